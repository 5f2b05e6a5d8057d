"""Attention as a model calls it: a model of its shapes with two layers, and one call of a site."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from optimus.core.probe import describe_probe
from optimus.core.replacement import Mixin, reclassed
from optimus.core.surgery import Surgeon, undo
from optimus.measure import load

BATCH, LAYERS = 4, 2
CALL = "_optimus_call"


class Recorder(Mixin):
    """A site that keeps what it was called with first."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        vars(self).setdefault(CALL, (args, kwargs))
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def lengths(config: Any, wanted: tuple[int, ...]) -> list[int]:
    """Those of the lengths that the model has positions for."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None) or max(wanted)
    return [length for length in wanted if length <= most]


@dataclass(frozen=True, slots=True)
class Small:
    """A model like ``config``'s with random weights and two layers, read at ``length`` tokens."""

    config: Any
    dtype: torch.dtype
    length: int

    @property
    def operations(self) -> float:
        """About what one attention layer computes, its projections included."""
        width: int = getattr(self.config.get_text_config(), "hidden_size", 1024)
        return 4.0 * BATCH * self.length * width * (2 * width + self.length)

    def build(self) -> nn.Module:
        """The model. ``LoadError`` where it cannot be had with two layers."""
        config = copy.deepcopy(self.config)
        config.use_cache = False
        text = config.get_text_config()
        if isinstance(getattr(text, "num_hidden_layers", None), int):
            text.num_hidden_layers = min(LAYERS, text.num_hidden_layers)
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[: text.num_hidden_layers]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = load.build(config, device="cpu").to(self.dtype)
        if describe_probe(model).startswith("not verified"):
            raise load.LoadError(f"{config.model_type} is not called with token ids alone.")
        return model

    def call(self, model: nn.Module, path: str) -> Callable[[], object]:
        """A call of the site with what the model calls it with first."""
        module = model.get_submodule(path)
        surgeon = Surgeon(model)
        surgeon.reclass(module, reclassed(Recorder, type(module)))
        try:
            model(**self._inputs(model))
        except Exception as error:  # any model may reject a batch that it did not ask for
            raise load.LoadError(f"it cannot read {self.length} tokens: {error}") from error
        finally:
            undo(model, surgeon.edits)
        if CALL not in vars(module):
            raise load.LoadError(f"the model does not call {path}.")
        args, kwargs = vars(module).pop(CALL)
        # A cache would grow with every call.
        kwargs = {k: None if "cache" in str(type(v)).lower() else v for k, v in kwargs.items()}
        return lambda: module(*args, **kwargs)

    def _inputs(self, model: nn.Module) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0)
        rows = int(self.config.get_text_config().vocab_size)
        shape = (BATCH, self.length)
        ids = torch.randint(min(3, rows - 1), rows, shape, generator=generator)
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "use_cache" in inspect.signature(model.forward).parameters:
            given["use_cache"] = False
        if self.config.is_encoder_decoder:
            given["decoder_input_ids"] = ids
        return given
