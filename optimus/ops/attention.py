"""Attention of many queries over a cache-sized number of keys, by ``native/attention.c``.

For inference, on a processor with AVX-512. Zen 4, two threads, 12 heads of 64, fp32, against
torch's flash kernel: 1.8x over 8 sequences of 86 tokens, 1.3x at 512 keys, 2.4x there where it is
causal; in bf16 2.7, 1.7 and 2.7x. Other processors were not measured.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from optimus.ops import native

# All scores of a few rows fit the cache up to here; longer calls are for kernels that go by blocks.
MOST_KEYS = 1024
# For fewer queries, laying the keys out costs more than it saves.
FEWEST_ROWS = 8
WIDTH = 16


class _Call(ctypes.Structure):
    """``optimus_attention`` of ``native/attention.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "mask", "output")),
        ("lengths", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "rows", "keys", "heads", "groups")),
        *((name, ctypes.c_int64) for name in ("dim", "value_dim")),
        *(
            (f"{name}_{axis}", ctypes.c_int64)
            for name in ("query", "key", "value")
            for axis in ("batch", "head", "token")
        ),
        *((name, ctypes.c_int64) for name in ("mask_batch", "mask_head", "mask_row")),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("mask_dtype", ctypes.c_int32),
        ("causal", ctypes.c_int32),
    )


def takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> bool:
    """Whether the kernel can read these tensors, and nobody needs its gradient or its graph."""
    given = (query, key, value) if mask is None else (query, key, value, mask)
    return (
        native.unobserved()
        and native.steps()
        and all(type(one) is Tensor and one.device.type == "cpu" for one in given)
        and not torch._C._functorch.peek_interpreter_stack()
        and not (torch.is_grad_enabled() and any(one.requires_grad for one in given))
        and query.dtype in native.DTYPES
        and query.dtype is key.dtype is value.dtype
        and query.shape[-1] % WIDTH == value.shape[-1] % WIDTH == 0
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and 0 not in (*query.shape, *value.shape)
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    cap: float = 0.0,
) -> Tensor | None:
    """``softmax(query keyᵀ * scale + mask) value``, ``[batch, queries, heads, value_dim]``.

    query ``[batch, heads, queries, dim]``; key and value may have fewer heads, each for as many of
    the queries'. mask: broadcastable to ``[batch, heads, queries, keys]``, bool or added; a query
    that sees nothing gives zeros, as SDPA's. causal: query i sees keys up to i. cap: scores
    become ``cap * tanh(score / cap)`` before the mask. None where the call is for another kernel.
    """
    if not _fits(query, key, value, mask):
        return None
    batch, heads, rows, _ = query.shape
    out = query.new_empty(batch, rows, heads, value.shape[-1])
    call = _described(query, key, value, out, scale=scale, causal=causal)
    call.count, call.rows, call.keys, call.cap = batch, rows, key.shape[2], cap
    call.query_batch, call.key_batch, call.value_batch = (
        one.stride(0) for one in (query, key, value)
    )
    if mask is not None:
        view = mask.expand(batch, heads, rows, key.shape[2])
        call.mask, call.mask_dtype = mask.data_ptr(), native.MASKS[mask.dtype]
        call.mask_batch, call.mask_head, call.mask_row = view.stride()[:3]
    return _run(call, out)


def within(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    *,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention within sequences that lie end to end: ``[1, heads, total, dim]`` in, ``[1, total,
    heads, value_dim]`` out. ``takes`` must be true, and no length be above ``MOST_KEYS``.
    """
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    call = _described(query, key, value, out, scale=scale, causal=causal)
    numbers = (ctypes.c_int64 * len(lengths))(*lengths)
    call.count, call.lengths = len(lengths), ctypes.addressof(numbers)
    return _run(call, out)


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    # First what needs no shape: an exporter would hold every length that is looked at to its range.
    return (
        takes(query, key, value, mask)
        and query.ndim == key.ndim == value.ndim == 4
        and query.shape[0] == key.shape[0] == value.shape[0]
        and query.shape[2] >= FEWEST_ROWS
        and key.shape[2] <= MOST_KEYS
        and key.shape[1] == value.shape[1]
        and query.shape[1] % key.shape[1] == 0
        and (mask is None or _reads(mask, key.shape[2]))
    )


def _reads(mask: Tensor, keys: int) -> bool:
    dense = mask.ndim == 4 and mask.shape[-1] == keys and mask.stride(-1) == 1
    return dense and mask.dtype in native.MASKS


def _described(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, *, scale: float | None, causal: bool
) -> _Call:
    call = _Call(query.data_ptr(), key.data_ptr(), value.data_ptr())
    call.output, call.dtype, call.causal = out.data_ptr(), native.DTYPES[query.dtype], causal
    call.heads, call.groups = query.shape[1], key.shape[1]
    call.dim, call.value_dim = query.shape[-1], value.shape[-1]
    call.scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    call.query_head, call.query_token = query.stride()[1:3]
    call.key_head, call.key_token = key.stride()[1:3]
    call.value_head, call.value_token = value.stride()[1:3]
    return call


def _run(call: _Call, out: Tensor) -> Tensor:
    if native.library().attention(ctypes.byref(call), torch.get_num_threads()):
        raise MemoryError("no memory for the scores of some queries over their keys")
    return out
