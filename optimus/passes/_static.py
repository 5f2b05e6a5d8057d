"""Generation in static shapes as a pass: which models it fits, whichever runs the graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from optimus.core.backend import Context, Mode
from optimus.core.errors import Refusal
from optimus.core.originals import Keeper
from optimus.core.paths import generates
from optimus.core.replacement import Fidelity
from optimus.core.surgery import Surgeon
from optimus.generation.runner import Runner
from optimus.generation.static import make_static

NEEDED = ("input_ids", "attention_mask", "position_ids", "past_key_values", "logits_to_keep")
# Rotary embeddings that look at how long the text is, and take another way.
LOOKING = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class Static:
    """The model's own class, with ``generate`` on graphs that ``make`` runs.

    ``check``: why the runner does not fit a model or a machine, besides what is said here.
    """

    name: str
    backends: frozenset[str]
    make: Callable[[], Runner]
    check: Callable[[nn.Module, Context], Refusal | None] = lambda model, context: None
    fidelity: Fidelity = Fidelity.CLOSE
    by_name: bool = True

    def concerns(self, model: nn.Module) -> bool:
        """Models that generate."""
        return generates(model)

    def refuses(self, model: nn.Module, context: Context) -> Refusal | None:
        """Where nothing generates, or on another kind of cache."""
        if context.backend.name not in self.backends:
            return Refusal(f"{self.name} is not for {context.backend.name}", hardware=True)
        if context.mode is not Mode.INFERENCE:
            return Refusal(f"{self.name} is not for {context.mode.value}")
        return unfit(model) or self.check(model, context)

    def settles(self, context: Context) -> Context:
        """Nothing changes for the others."""
        return context

    def run(self, model: nn.Module, surgeon: Surgeon, keeper: Keeper) -> None:
        """Swap the class of the root."""
        make_static(model, self.make, surgeon)


def unfit(model: Any) -> Refusal | None:
    """Why a model does not decode in static shapes, or None."""
    if not generates(model):
        return Refusal("it does not generate by transformers' generate")
    config = model.config.get_text_config(decoder=True)
    accepted = inspect.signature(type(model).forward).parameters
    missing = [name for name in NEEDED if name not in accepted]
    if model.config.is_encoder_decoder or missing:
        why = f"its forward takes no {', '.join(missing)}" if missing else "it has an encoder"
        return Refusal(f"static shapes are for decoders alone: {why}")
    if not getattr(model, "_can_compile_fullgraph", False):
        return Refusal("transformers says that its forward is not one graph")
    if len(set((getattr(model, "hf_device_map", None) or {"": 0}).values())) > 1:
        return Refusal("it is spread over several devices")
    return _unfit_inputs(model, config) or _unfit_cache(config)


def _unfit_inputs(model: Any, config: Any) -> Refusal | None:
    from transformers import GenerationMixin

    own = type(model).prepare_inputs_for_generation
    if own is not GenerationMixin.prepare_inputs_for_generation:
        return Refusal("it prepares its inputs for a step in a way of its own")
    rotary = getattr(config, "rope_parameters", None) or {}
    kinds = {rotary.get("rope_type"), *(getattr(one, "rope_type", None) for one in [config])}
    looking = [kind for kind in LOOKING if kind in kinds]
    if looking:
        return Refusal(f"its {looking[0]} rotary embedding depends on how long the text is")
    return None


def _unfit_cache(config: Any) -> Refusal | None:
    from transformers.cache_utils import StaticCache, StaticLayer
    from transformers.masking_utils import (
        ALL_MASK_ATTENTION_FUNCTIONS,
        eager_mask,
        sdpa_mask,
    )

    try:
        layers = StaticCache(config=config, max_cache_len=1).layers
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return Refusal(f"transformers has no static cache for it ({error})")
    if others := [type(one).__name__ for one in layers if type(one) is not StaticLayer]:
        return Refusal(
            f"a layer's cache is a {others[0]}, and only whole pasts are in static shapes"
        )
    attention = config._attn_implementation
    if ALL_MASK_ATTENTION_FUNCTIONS.get(attention) not in (eager_mask, sdpa_mask):
        return Refusal(f"its attention is {attention}, which takes no mask as a tensor")
    return None
