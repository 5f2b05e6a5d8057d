"""Attention of models that are on SDPA already, where the host's way with it loses time on CPUs.

A third registered pair, after the two of ``_attention``. Its name is neutral for the same reason.
What the host does, and what is done here instead (one thread, AVX-512, fp32 and bf16):

- One query over grouped keys. The fused kernel takes them head by head and reads every key as
  often as there are queries in a group; when compiling, or on older hosts, they are copied so
  often first. Here the queries of a group are the rows of one product. 32 heads over 8, 1024
  keys: 1.8x in fp32 and 10x in bf16; compiled with a mask, as a static cache has one, 7x and more.
- Several queries over grouped keys with a mask. The host copies the keys; the kernel need not:
  1.0x to 1.4x for a prompt, 1.4x to 3.9x for 4 or 16 tokens after 512.
- Values narrower than keys (latent attention). The fused kernel wants one width, and the host's
  call ends in the unfused one; zeros fill the values up where that pays.
  512 tokens: 1.5x at 192 over 128, 2.4x at 96 over 64.
- A causal mask that nobody asked for, when compiling. The host leaves it out only where its torch
  can tell compiling from exporting.

Training is left to the host: the fused backward over shared keys is 0.8x to 1.8x, and over padded
values 0.25x to 1.5x.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from optimus.core.backend import Context
from optimus.core.errors import Refusal
from optimus.core.paths import Site
from optimus.core.replacement import Mixin
from optimus.core.surgery import Surgeon
from optimus.replacements._attention import (
    GROUPED,
    OTHERS,
    own_attention,
    plain_attention,
    selected,
    switch,
    unpadded_attention,
)

# What SDPA has no argument for, and what a call must not lose.
SINKS = ("s_aux", "sinks")
# Padding wide values loses (0.75x to 0.97x) where the fused kernel works in blocks of 32 rows, and
# wins above; narrow ones win everywhere, short of a few rows over very many keys.
WIDE, FEW_ROWS, MANY_ROWS, KEYS_A_ROW = 128, 64, 192, 32
BRANCHES = re.compile(r"_attn_implementation\s*(?:==|!=|in\b|not in\b)")
# Models with an indexer leave out keys themselves under these names, and hand us the rest.
INDEXED, HANDED = '_attn_implementation in ("eager", "sdpa")', "indices=sparse_indices"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """In place of sdpa. ``[batch, heads, length, dim]`` in, ``[batch, length, heads, dim]`` out."""
    if "sequences" in kwargs:
        return unpadded_attention(module, query, key, value, attention_mask, **kwargs)
    if any(kwargs.get(name) is not None for name in SINKS):
        raise ValueError(
            f"{type(module).__name__} passes attention sinks, which SDPA would ignore. "
            "Load the model with attn_implementation='eager'."
        )
    indices, mask = kwargs.pop("indices", None), attention_mask
    if mask is not None:
        mask = selected(mask, query, key, indices)
    if not _is_for_host(query, kwargs):
        if query.shape[1] > key.shape[1] and query.shape[2] == 1:
            return _one_row(query, key, value, mask, kwargs.get("scaling")), None
        if (out := own_attention(module, query, key, value, mask, **kwargs)) is not None:
            return out, None
        if query.shape[1] > key.shape[1] and mask is not None:
            return _shared(query, key, value, mask, kwargs.get("scaling")), None
        if _pays_padding(query, key, value):
            width = value.shape[-1]
            value = F.pad(value, (0, query.shape[-1] - width))
            out = plain_attention(module, query, key, value, mask, **kwargs)[0]
            return out[..., :width].contiguous(), None
    return plain_attention(module, query, key, value, mask, **kwargs)


def _is_for_host(query: Tensor, kwargs: dict[str, Any]) -> bool:
    return bool(
        query.device.type != "cpu"
        or (query.requires_grad and torch.is_grad_enabled())
        or kwargs.get("dropout")
        or any(kwargs.get(name) is not None for name in OTHERS)
        or torch.jit.is_tracing()
        or _is_exporting()
    )


def _is_exporting() -> bool:
    """Dynamo before torch 2.14 may say that it exports whenever it compiles; the flag knows."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", torch.compiler.is_exporting()))


def _one_row(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """One query a head, those of a group as the rows of one product. It may see every key."""
    heads, groups = query.shape[1], key.shape[1]
    rows = query.reshape(query.shape[0], groups, heads // groups, query.shape[-1])
    if mask is not None and mask.shape[1] > 1:
        mask = mask.reshape(mask.shape[0], groups, heads // groups, mask.shape[-1])
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    return out.reshape(out.shape[0], 1, heads, out.shape[-1])


def _shared(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """The mask says all there is to say of causality; the keys stay as few as they are."""
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous()


def _pays_padding(query: Tensor, key: Tensor, value: Tensor) -> bool:
    rows, width = query.shape[2], query.shape[3]
    return (
        value.shape[3] < width
        and rows > 1
        and key.shape[2] <= KEYS_A_ROW * rows
        and (width <= WIDE or rows <= FEW_ROWS or rows >= MANY_ROWS)
    )


def grouped_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The host's mask for SDPA, or None where the causal flag says the same while compiling."""
    from transformers.masking_utils import sdpa_mask

    if torch.compiler.is_compiling() and not _is_exporting() and _is_plain(**kwargs):
        return None
    return sdpa_mask(*args, **kwargs)


def _is_plain(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    attention_mask: Tensor | None,
    allow_is_causal_skip: bool,
    local_size: int | None = None,
    **_: Any,
) -> bool:
    """Nothing padded, packed, overlaid or out of the window, and no room kept in a static cache."""
    return (
        allow_is_causal_skip
        and attention_mask is None
        and not isinstance(q_offset, Tensor)
        and (local_size is None or kv_length < local_size)
        and (q_length == 1 or q_length == kv_length)
    )


def register() -> None:
    """Announce the pair to transformers. Harmless to repeat; the host cannot unregister."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(GROUPED, grouped_attention)
    AttentionMaskInterface.register(GROUPED, grouped_mask)


class GroupedAttention(Mixin):
    """A decoder on SDPA whose keys are shared by groups, or wider than its values."""

    attends = True

    @classmethod
    def accepts(cls, site: Site, context: Context) -> Refusal | None:
        return unfit_config(site.module.config) or _unfit_attention(site.module, context.dtype)

    @classmethod
    def setup(cls, module: nn.Module, surgeon: Surgeon) -> None:
        register()
        switch(module, surgeon, GROUPED)


def unfit_config(config: Any) -> Refusal | None:
    """Why attention of this config is not plain SDPA."""
    if config._attn_implementation != "sdpa":
        return Refusal(f"attention is {config._attn_implementation}, and this is about sdpa")
    if getattr(config, "sub_configs", None):
        return Refusal("composite config: each part has a switch of its own")
    if getattr(config, "output_attentions", False):
        return Refusal("the config asks for attention weights")
    if getattr(config, "attn_logit_softcapping", None):
        return Refusal("config.attn_logit_softcapping is not for SDPA")
    return None


def _unfit_attention(module: nn.Module, dtype: torch.dtype) -> Refusal | None:
    parts = list(module.modules())
    if dtype.itemsize < 4 and any(getattr(p, "indexer", None) is not None for p in parts):
        return Refusal(
            "its indexer picks keys, and picks others where a half float rounds otherwise"
        )
    if any(getattr(part, name, None) is not None for part in parts for name in SINKS):
        return Refusal("its attention has sinks, which SDPA ignores")
    if _branches_on_name(type(module).__module__):
        return Refusal("its modeling file asks for the name of the attention, and knows its own")
    if not any(_is_grouped(part) or is_latent(part) for part in parts):
        return Refusal("each head has keys of its own, as wide as its values: 1.0x, as sdpa")
    return None


def _is_grouped(part: nn.Module) -> bool:
    groups = getattr(part, "num_key_value_groups", 1)
    return isinstance(groups, int) and groups > 1


def is_latent(part: nn.Module) -> bool:
    """Whether it is attention whose values are narrower than its keys."""
    keys, values = getattr(part, "qk_head_dim", 0), getattr(part, "v_head_dim", 0)
    return isinstance(keys, int) and isinstance(values, int) and 0 < values < keys


def _branches_on_name(name: str) -> bool:
    return source_says(name, BRANCHES)


@functools.cache
def source_says(name: str, pattern: re.Pattern[str]) -> bool:
    """Whether the modeling file has the pattern, apart from where an indexer hands on its keys;
    True of a file that cannot be read."""
    try:
        source = inspect.getsource(sys.modules[name])
    except OSError:
        return True
    if HANDED in source:
        source = source.replace(INDEXED, "")
    return pattern.search(source) is not None
