"""What a decoder layer does between its products, for the few rows of a decoded token.

At one row a layer of a 1.1 B Llama spends 0.36 ms beside its products: some forty operators of a
few microseconds. Each function here is one call into ``native/layer.c``, in fp32 inside. None is
differentiable, and none is for compilers, which fuse such operators themselves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from optimus.ops import native
from optimus.ops.native import DTYPES, PLAIN
from optimus.ops.quantized import QuantizedWeight

# As in native/quantized.c: what one call rounds at once, and the weights that share it.
MOST_ROWS, MOST_WEIGHTS = 64, 4


class Step(ctypes.Structure):
    """``optimus_step`` of ``native/layer.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "cos", "sin", "mask")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "output")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "groups", "dim", "past", "room")),
        *((name, ctypes.c_int64) for name in ("turn", "mask_batch", "mask_key")),
        ("scale", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("mask_dtype", ctypes.c_int32),
    )


def rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * input / sqrt(mean(input²) + eps)``, ``[..., width]``, contiguous, of one dtype."""
    out = torch.empty_like(input)
    width = input.shape[-1]
    native.library().norm(
        input.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        input.numel() // width,
        width,
        width,
        eps,
        DTYPES[input.dtype],
        torch.get_num_threads(),
    )
    return out


def gate(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in place of ``gate``; both contiguous, of one shape and dtype."""
    native.library().gate(
        gate.data_ptr(), up.data_ptr(), gate.numel(), DTYPES[gate.dtype], torch.get_num_threads()
    )
    return gate


def products(
    input: Tensor, weights: Sequence[Any], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """``input @ weightᵀ + bias`` for each of the packed weights: in one call where they allow it.

    ``input`` is contiguous, ``[..., in]``. Weights that round it alike round it once.
    """
    rows = input.numel() // input.shape[-1]
    if 0 < rows <= MOST_ROWS and _round_alike(weights) and readable(biases):
        return _group(input, weights, biases, rows)
    return [w.matmul(input, bias) for w, bias in zip(weights, biases, strict=True)]


def _round_alike(weights: Sequence[Any]) -> bool:
    one = weights[0]
    return len(weights) <= MOST_WEIGHTS and all(
        type(w) is QuantizedWeight and w.scheme == one.scheme and w.in_features == one.in_features
        for w in weights
    )


def readable(biases: Sequence[Tensor | None]) -> bool:
    """Whether the kernels take these biases as they are."""
    return all(
        b is None or (type(b) in PLAIN and b.dtype in DTYPES and b.is_contiguous()) for b in biases
    )


def _group(
    input: Tensor, weights: Sequence[Any], biases: Sequence[Tensor | None], rows: int
) -> list[Tensor]:
    outputs = [input.new_empty((*input.shape[:-1], w.out_features)) for w in weights]
    pointers, kinds = ctypes.c_void_p * len(weights), ctypes.c_int * len(weights)
    library = native.library()
    failed = library.group(
        pointers(*(w.address for w in weights)),
        len(weights),
        input.data_ptr(),
        rows,
        input.shape[-1],
        DTYPES[input.dtype],
        pointers(*(None if bias is None else bias.data_ptr() for bias in biases)),
        kinds(*(0 if bias is None else DTYPES[bias.dtype] for bias in biases)),
        pointers(*(out.data_ptr() for out in outputs)),
        torch.get_num_threads(),
        library.kernels,
    )
    if failed:
        raise MemoryError("no memory for the rounded activations of quantized linear layers")
    return outputs


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    turns: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    past: int,
    *,
    scale: float,
    mask: Tensor | None,
) -> Tensor:
    """One new token over a cache, ``[batch, 1, heads * dim]``.

    query ``[batch, 1, heads * dim]``, key and value ``[batch, 1, groups * dim]``, contiguous and
    not yet turned. turns: cos and sin ``[batch or 1, 1, dim]``. cache: keys and values
    ``[batch, groups, room, dim]``, of which ``past`` are filled; the new token is written behind
    them. mask: ``[batch or 1, 1, 1, past + 1]``, bool or added to the scores. Of one dtype.
    """
    out = torch.empty_like(query)
    call = Step(query.data_ptr(), key.data_ptr(), value.data_ptr())
    call.output, call.scale = out.data_ptr(), scale
    call.heads, call.groups, call.dim = query.shape[-1] // cache[0].shape[3], *cache[0].shape[1::2]
    place(call, query.dtype, turns, (*cache, past), mask)
    if native.library().attend(ctypes.byref(call), torch.get_num_threads()):
        raise MemoryError("no memory for the scores of one token over its cache")
    return out


def place(
    call: Step,
    dtype: torch.dtype,
    turns: tuple[Tensor, Tensor],
    room: tuple[Tensor, Tensor, int],
    mask: Tensor | None,
) -> None:
    """Where the new token stands: its angles, the cache that it goes to, and what it may see.

    ``call`` knows the dim. room: keys, values and how many tokens are in them.
    """
    cos, sin = turns
    keys, values, call.past = room
    call.batch, call.room, call.dtype = keys.shape[0], keys.shape[2], DTYPES[dtype]
    call.cos, call.sin = cos.data_ptr(), sin.data_ptr()
    call.turn = call.dim if cos.shape[0] > 1 else 0
    call.keys, call.values = keys.data_ptr(), values.data_ptr()
    if mask is not None:
        call.mask = mask.data_ptr()
        call.mask_batch = 0 if mask.shape[0] == 1 else mask.stride(0)
        call.mask_key = mask.stride(-1)
        call.mask_dtype = native.MASKS[mask.dtype]


def fits_mask(mask: Tensor | None, batch: int, length: int) -> bool:
    """Whether ``attend`` can read this mask."""
    return mask is None or (
        mask.ndim == 4
        and mask.shape[0] in (1, batch)
        and mask.shape[1:] == (1, 1, length)
        and mask.dtype in native.MASKS
    )
