"""Models of any type with weights that make every part of them matter."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from .configs import tiny

# Generating heads first, then the bare model; the rest by name.
PREFERRED = (
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModel",
)


def auto_classes() -> list[str]:
    """Every auto class, the preferred ones first."""
    every = sorted(
        name
        for name in dir(modeling_auto)
        if name.startswith("AutoModel") and hasattr(getattr(modeling_auto, name), "_model_mapping")
    )
    return [*PREFERRED, *(name for name in every if name not in PREFERRED)]


def heads(model_type: str) -> list[str]:
    """The auto classes that have a model of that type, the most useful first."""
    listed = [n for n in auto_classes() if CONFIG_MAPPING[model_type] in _mapping(n)]
    found = [name for name in listed if _is_for(name, model_type)] or listed
    # What has a head for masked words reads both ways unless told otherwise: it does not generate.
    if "AutoModelForMaskedLM" in found and "AutoModelForCausalLM" in found:
        found.remove("AutoModelForCausalLM")
        found.append("AutoModelForCausalLM")
    return found


def _mapping(head: str) -> Any:
    return getattr(transformers, head)._model_mapping


def _is_for(head: str, model_type: str) -> bool:
    """Whether the model that an auto class lists is made from that config, not from a part."""
    config = CONFIG_MAPPING[model_type]
    try:
        found = _mapping(head)[config]
        made_from = (found[0] if isinstance(found, tuple) else found).config_class
    except ImportError:
        # A stand-in for a class whose packages are not installed: it is the one that is meant.
        return True
    return made_from is None or issubclass(config, made_from)


def model_types() -> list[str]:
    """Every model type of the installed transformers that some auto class builds."""
    mappings = [_mapping(name) for name in auto_classes()]
    return [t for t, config in CONFIG_MAPPING.items() if any(config in m for m in mappings)]


def build(
    model_type: str,
    *,
    head: str | None = None,
    attention: str | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> nn.Module:
    """A tiny model in eval mode; ``head`` is an auto class, its most useful one unless given."""
    config = tiny(model_type)
    return build_from(config, head or heads(model_type)[0], attention, dtype, seed)


def build_from(
    config: PreTrainedConfig, head: str, attention: str | None, dtype: torch.dtype, seed: int
) -> nn.Module:
    """The model of a config that the caller has made."""
    # An auto class with several models looks here which of them is meant.
    config.architectures = config.architectures or []
    chosen = {} if attention is None else {"attn_implementation": attention}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, head).from_config(config, **chosen)
        model = _callable_part(model)
        stir(model)
    return model.to(dtype).eval()


def _callable_part(model: nn.Module) -> nn.Module:
    """The model, or its first part that can be called where it only generates over its parts."""
    if getattr(type(model), "forward", None) is not nn.Module.forward:
        return model
    return next((m for m in model.children() if isinstance(m, PreTrainedModel)), model)


def stir(model: nn.Module) -> None:
    """Weights with which attention has preferences, no bias is zero and no norm explodes."""
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.is_floating_point():
                    _stir(module, parameter)


def _stir(module: nn.Module, parameter: Tensor) -> None:
    if parameter.ndim > 1 and "Norm" not in type(module).__name__:
        parameter.normal_(0, 0.6 / math.sqrt(_inputs_of(module, parameter)))
    else:
        parameter.nan_to_num_().add_(0.1 * torch.randn_like(parameter))


def _inputs_of(module: nn.Module, parameter: Tensor) -> int:
    """How many numbers are added up in one output."""
    if isinstance(module, nn.Embedding):
        return 4
    if isinstance(module, nn.modules.conv._ConvNd):
        return max(1, parameter[0].numel())
    return parameter.shape[0] if isinstance(module, Conv1D) else parameter.shape[-1]
