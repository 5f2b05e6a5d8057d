"""Fused attention through transformers' own switch: two registered functions and their masks.

The names are neutral on purpose: one that contained "sdpa" or "flash" would be treated as the
host's, and one without a mask function would get no mask at all (transformers, masking_utils).

``FUSED`` stands in for "eager": float masks, so that whatever else reads the mask finds what it
found before, and the model's own eager function for the calls that need attention weights.
``UNPADDED`` stands in for "sdpa": the host's function and masks, and varlen attention for the
calls that ``_encoder`` has packed.
"""

from __future__ import annotations

import copy
import sys
from typing import Any, cast

import torch
from torch import Tensor, nn

from optimus.core.backend import CPUS, Context
from optimus.core.errors import Refusal
from optimus.core.paths import Site
from optimus.core.replacement import Mixin
from optimus.core.surgery import Surgeon
from optimus.ops.varlen import varlen_attention

FUSED = "optimus_fused"
UNPADDED = "optimus_unpadded"
OURS = frozenset({FUSED, UNPADDED})
SWITCH = "_attn_implementation_internal"
WAITING = "_optimus_configs"


def fused_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """In place of eager. ``[batch, heads, length, dim]`` in, ``[batch, length, heads, dim]`` out.

    The stock function answers where weights, dropout, a soft cap or sinks are asked for, which
    the fused kernels would drop without a word, and where the caller's own mask is boolean: eager
    adds what SDPA takes as a choice.
    """
    if "sequences" in kwargs:
        return unpadded_attention(module, query, key, value, mask, **kwargs)
    if (
        kwargs.get("dropout")
        or _weights_wanted(kwargs)
        or (mask is not None and not mask.is_floating_point())
        or any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias"))
    ):
        return cast(Any, _eager_of(module))(module, query, key, value, mask, **kwargs)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    kwargs["is_causal"] = False
    return cast(
        tuple[Tensor, None], sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    )


def _weights_wanted(kwargs: dict[str, Any]) -> bool:
    from transformers.utils.output_capturing import _active_collector

    # Not every model hands the argument down to its attention (GPT-2): ask the recorder too.
    recorded = _active_collector.get() or {}
    return bool(kwargs.get("output_attentions")) or "attentions" in recorded


def unpadded_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """In place of sdpa, for packed calls and others. Shapes as ``fused_attention``."""
    sequences = kwargs.pop("sequences", None)
    if sequences is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return cast(
            tuple[Tensor, None], sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        )
    window = kwargs.get("sliding_window")
    # Flash kernels count the token itself; the mask of the host does not (ModernBERT adds one).
    reach = None if window is None else window - 1
    return varlen_attention(
        query, key, value, sequences, scale=kwargs.get("scaling"), window=reach
    ), None


def register() -> None:
    """Announce both functions to transformers. Harmless to repeat; the host cannot unregister."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    AttentionInterface.register(FUSED, fused_attention)
    AttentionMaskInterface.register(FUSED, eager_mask)
    AttentionInterface.register(UNPADDED, unpadded_attention)
    AttentionMaskInterface.register(UNPADDED, sdpa_mask)


class HostSwitch:
    """The attention switch of the module at ``path``, set on a config of the model's own.

    Models built from one config object share it, and so would share the switch. The whole model
    gets the copy, so that it still has one config; what the user changes on it meanwhile is handed
    to the original when that comes back.
    """

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name = path, name

    def fold(self, model: nn.Module) -> None:
        """Give every module of ``model`` that shares the config the switched copy."""
        register()
        stock = model.get_submodule(self.path).config
        own = copy.copy(stock)
        setattr(own, SWITCH, self.name)
        places = [(m, key) for m in model.modules() for key, v in vars(m).items() if v is stock]
        waiting = vars(model).setdefault(WAITING, {})
        waiting[self.path] = (stock, dict(vars(own)), places)
        for place, key in places:
            vars(place)[key] = own

    def unfold(self, model: nn.Module) -> None:
        """Put the original config back in every place."""
        waiting = vars(model).get(WAITING, {})
        if self.path not in waiting:
            return
        stock, then, places = waiting[self.path]
        now = vars(model.get_submodule(self.path).config)
        changed = {k: v for k, v in now.items() if k != SWITCH and then.get(k, stock) is not v}
        for place, key in places:
            vars(place)[key] = stock
        vars(stock).update(changed)
        del waiting[self.path]
        if not waiting:
            del vars(model)[WAITING]

    def __deepcopy__(self, memo: dict[int, Any]) -> HostSwitch:
        return self


class FusedAttention(Mixin):
    """A decoder or encoder whose eager attention runs on SDPA. Only the config is changed.

    Measured against transformers' eager functions (12 heads of 64, one thread, Zen 5): fp32 2.1 to
    3.2x, fp16 3.5 to 12x; bf16 0.45x up to 256 tokens, and so refused.
    """

    @classmethod
    def accepts(cls, site: Site, context: Context) -> Refusal | None:
        config = getattr(site.module, "config", None)
        name = getattr(config, "_attn_implementation", None)
        if name != "eager":
            return Refusal(f"attention is already {name}")
        if context.dtype is torch.bfloat16 and context.backend.name in CPUS:
            return Refusal("bf16 SDPA is slower than eager on CPUs: 0.45x measured at 256 tokens")
        return _unfit_config(site.module) or _unfit_source(site.module)

    @classmethod
    def setup(cls, module: nn.Module, surgeon: Surgeon) -> None:
        switch(module, surgeon, FUSED)


def switch(module: nn.Module, surgeon: Surgeon, name: str) -> None:
    """Set the host's switch for ``module`` through the surgeon."""
    surgeon.fold(surgeon.model, HostSwitch(surgeon.path(module), name))


def _unfit_config(module: nn.Module) -> Refusal | None:
    config = module.config
    if getattr(config, "sub_configs", None):
        return Refusal("composite config: each part has a switch of its own")
    if getattr(config, "output_attentions", False):
        return Refusal("the config asks for attention weights")
    for name in ("reorder_and_upcast_attn", "attn_logit_softcapping"):
        if getattr(config, name, None):
            return Refusal(f"config.{name} needs the eager path")
    return None


def _unfit_source(module: nn.Module) -> Refusal | None:
    if _eager_of(module) is None:
        return Refusal("its modeling file has no eager_attention_forward to fall back on")
    return None


def _eager_of(module: nn.Module) -> object:
    source = sys.modules.get(type(module).__module__)
    return getattr(source, "eager_attention_forward", None)
