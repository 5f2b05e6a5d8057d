"""Fused attention through transformers' own switch: two registered functions and their masks.

The names are neutral on purpose: one that contained "sdpa" or "flash" would be treated as the
host's, and one without a mask function would get no mask at all (transformers, masking_utils).

``FUSED`` stands in for "eager": float masks, so that whatever else reads the mask finds what it
found before, and the model's own eager function for the calls that need attention weights.
``UNPADDED`` stands in for "sdpa": the host's function and masks, and varlen attention for the
calls that ``_unpadding`` has packed.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from typing import Any, cast

import torch
from torch import Tensor, nn

from optimus.core.backend import Context, Mode
from optimus.core.errors import Refusal
from optimus.core.paths import Site
from optimus.core.replacement import SHORTEST, Mixin
from optimus.core.surgery import Surgeon
from optimus.ops.attention import attention
from optimus.ops.capped import capped_attention
from optimus.ops.kernels import spoils_gradients
from optimus.ops.packed import PackedGraph
from optimus.ops.sinks import sink_attention
from optimus.ops.varlen import varlen_attention
from optimus.replacements._watch import records_weights

FUSED = "optimus_fused"
UNPADDED = "optimus_unpadded"
GROUPED = "optimus_grouped"
# Whoever is switched to one of them knows what to do with packed tokens.
OURS = frozenset({FUSED, UNPADDED, GROUPED})
SWITCH = "_attn_implementation_internal"
WAITING = "_optimus_configs"
EAGER = "eager_attention_forward"
# What the host's function does something about that no kernel of ours does.
OTHERS = ("position_bias", "softcap", "cache")
# Where an attention layer keeps its soft cap.
CAP = "attn_logit_softcapping"


def fused_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """In place of eager. ``[batch, heads, length, dim]`` in, ``[batch, length, heads, dim]`` out.

    The stock function answers what the fused kernels would drop without a word; see
    ``_needs_stock``.
    """
    if "sequences" in kwargs:
        return unpadded_attention(module, query, key, value, attention_mask, **kwargs)
    mask = selected(attention_mask, query, key, kwargs.pop("indices", None))
    if _needs_stock(module, query, key, mask, kwargs):
        return _stock(module, query, key, value, mask, **kwargs)
    if _has_sinks(kwargs):
        return _with_sinks(module, query, key, value, mask, **kwargs)
    if kwargs.get("softcap") is not None:
        return _with_cap(module, query, key, value, mask, **kwargs)
    kwargs["is_causal"] = False
    return plain_attention(module, query, key, value, mask, **kwargs)


def plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As the host's function for SDPA, by our own kernel where it takes the call."""
    out = own_attention(module, query, key, value, mask, **kwargs)
    if out is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out, _ = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    return out, None


def own_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Tensor | None:
    """By our own kernel, ``[batch, length, heads, dim]``; None where it does not take the call."""
    if kwargs.get("dropout") or any(kwargs.get(name) is not None for name in OTHERS):
        return None
    causal = mask is None and is_flagged(module, kwargs.get("is_causal"))
    return attention(query, key, value, mask=mask, causal=causal, scale=kwargs.get("scaling"))


def is_flagged(module: nn.Module, is_causal: bool | None) -> bool:
    """Whether a call is to be causal, as the host reads it: the argument, or else the layer."""
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _stock(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    out, weights = _eager_of(module)(module, *args, **kwargs)
    return out, weights


def _needs_stock(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> bool:
    """Where weights or dropout are asked for, or nothing is, or the caller's own mask is boolean
    (eager adds what SDPA takes as a choice); and where the kernels' gradients would be wrong: of a
    learned bias, and of rows without keys. Those with sinks are ours and right.
    """
    return bool(
        kwargs.get("dropout")
        or kwargs.get("output_attentions")
        or records_weights(module)
        or (mask is not None and not mask.is_floating_point())
        or any(_is_learned(t) for t in (mask, kwargs.get("position_bias")))
        or 0 in (*query.shape, *key.shape)
        or (
            mask is not None
            and not _has_sinks(kwargs)
            and torch.is_grad_enabled()
            and spoils_gradients(mask)
        )
    )


def _has_sinks(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("s_aux") is not None or kwargs.get("sinks") is not None


def _is_learned(bias: Tensor | None) -> bool:
    return bias is not None and bias.requires_grad and torch.is_grad_enabled()


def selected(
    mask: Tensor | None, query: Tensor, key: Tensor, indices: Tensor | None
) -> Tensor | None:
    """``mask`` without the keys that sparse ``indices [batch, length, top]`` leave out.

    Models with an indexer do this themselves where the switch says "eager", and by its name only.
    """
    if indices is None:
        return mask
    left_out = indices.new_ones((*indices.shape[:2], key.shape[2]), dtype=torch.bool)
    left_out = left_out.scatter(-1, indices.long(), value=False).unsqueeze(1)
    if mask is not None and mask.dtype is torch.bool:
        return mask & ~left_out
    mask = query.new_zeros(()) if mask is None else mask
    return mask.masked_fill(left_out, torch.finfo(query.dtype).min)


def _with_sinks(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    # The host's name for a logit a head, and Inkling 2's for one a head and token.
    of_heads, of_tokens = kwargs.get("s_aux"), kwargs.get("sinks")
    sinks = of_heads.view(1, -1, 1) if of_heads is not None else of_tokens.squeeze(-1)
    bias = [b for b in (kwargs.get("position_bias"), mask) if b is not None]
    merged = sum(bias[1:], bias[0]).contiguous() if bias else None
    out = sink_attention(query, key, value, sinks, merged, kwargs["scaling"])
    if out is None:
        return _stock(module, query, key, value, mask, **kwargs)
    return out.transpose(1, 2).contiguous(), None


def _with_cap(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    scale, cap = kwargs.get("scaling") or query.shape[-1] ** -0.5, kwargs["softcap"]
    if key.shape[2] < vars(module).get(SHORTEST, 1):
        return _stock(module, query, key, value, mask, **kwargs)
    out = attention(query, key, value, mask=mask, scale=scale, cap=cap)
    if out is not None:
        return out, None
    out = capped_attention(query, key, value, mask, scale, cap)
    if out is None:
        return _stock(module, query, key, value, mask, **kwargs)
    return out.transpose(1, 2).contiguous(), None


def unpadded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """In place of sdpa, for packed calls and others. Shapes as ``fused_attention``."""
    sequences = kwargs.pop("sequences", None)
    if sequences is None:
        return plain_attention(module, query, key, value, attention_mask, **kwargs)
    if isinstance(sequences, PackedGraph):
        return sequences.attention(query, key, value, kwargs.get("scaling")), None
    if sequences.states is not None:
        sequences.states[module.layer_idx] = key, value
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
    gets the copy, so that it still has one config, or only what is ``within`` the module; what the
    user changes on it meanwhile is handed to the original when that comes back.
    """

    def __init__(self, path: str, name: str, *, within: bool = False) -> None:
        self.path, self.name, self.within = path, name, within

    def fold(self, model: nn.Module) -> None:
        """Give every module of ``model`` that shares the config the switched copy."""
        register()
        module = model.get_submodule(self.path)
        stock, reach = module.config, module if self.within else model
        own = copy.copy(stock)
        setattr(own, SWITCH, self.name)
        places = [(m, key) for m in reach.modules() for key, v in vars(m).items() if v is stock]
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
    """A decoder or encoder whose eager attention runs on SDPA. Only the config is changed."""

    attends = True

    @classmethod
    def accepts(cls, site: Site, context: Context) -> Refusal | None:
        config = getattr(site.module, "config", None)
        name = getattr(config, "_attn_implementation", None)
        if name != "eager":
            return Refusal(f"attention is already {name}")
        return _unfit_config(site.module, context) or _unfit_source(site.module)

    def limited(self) -> list[nn.Module]:
        """Itself, and the layers whose caps are cut into tiles: of a few keys at a loss."""
        parts = cast(nn.Module, self).modules()
        return [part for part in parts if part is self or getattr(part, CAP, None) is not None]

    @classmethod
    def setup(cls, module: nn.Module, surgeon: Surgeon) -> None:
        switch(module, surgeon, FUSED)


class FusedWithin(FusedAttention):
    """Where other layers share the config and must stay: theirs give their weights unasked."""

    @classmethod
    def setup(cls, module: nn.Module, surgeon: Surgeon) -> None:
        switch(module, surgeon, FUSED, within=True)


def switch(module: nn.Module, surgeon: Surgeon, name: str, *, within: bool = False) -> None:
    """Set the host's switch for ``module`` through the surgeon."""
    surgeon.fold(surgeon.model, HostSwitch(surgeon.path(module), name, within=within))


def _unfit_config(module: nn.Module, context: Context) -> Refusal | None:
    config = module.config
    if getattr(config, "sub_configs", None):
        return Refusal("composite config: each part has a switch of its own")
    if getattr(config, "output_attentions", False):
        return Refusal("the config asks for attention weights")
    if getattr(config, "reorder_and_upcast_attn", None):
        return Refusal("config.reorder_and_upcast_attn needs the eager path")
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is not None and context.mode is Mode.TRAINING:
        return Refusal(f"no backward pass through a soft cap of {cap:g} (attn_logit_softcapping)")
    return None


def _unfit_source(module: nn.Module) -> Refusal | None:
    parts = list(module.modules())
    asking = [part for part in parts if "get_interface" in names_in_forward(type(part))]
    if not asking:
        own = {type(part).__name__ for part in parts if "Attention" in type(part).__name__}
        return Refusal(f"its attention does not ask the host: {', '.join(sorted(own)) or 'none'}")
    if any(EAGER not in names_in_forward(type(part)) for part in asking):
        return Refusal(f"its attention has no {EAGER} to fall back on")
    return None


@functools.cache
def names_in_forward(cls: type[Any]) -> frozenset[str]:
    """What the forward looks up: the switch reaches only those who look for their function."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return frozenset(code.co_names if code is not None else ())


def _eager_of(module: nn.Module) -> Any:
    return getattr(sys.modules[type(module).__module__], EAGER)
