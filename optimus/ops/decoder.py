"""A decoded token through a whole layer in one call: ``native/decoder.c``.

A layer of llama's kind, on linear layers that are rounded or packed in bf16. By operators, a token
of a 1.1 B shape spends 8 to 12 ms beside its products on two threads; so it spends 2.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from optimus.ops import native
from optimus.ops.linear import Panels
from optimus.ops.native import DTYPES
from optimus.ops.quantized import QuantizedWeight
from optimus.ops.step import Step, place

PRODUCTS, NORMS = 7, 4


class _Product(ctypes.Structure):
    """``optimus_product`` of ``native/decoder.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "panels", "bias")),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("bias_dtype", ctypes.c_int32),
        ("padding", ctypes.c_int32),
    )


class _Layer(ctypes.Structure):
    """``optimus_layer`` of ``native/decoder.c``."""

    _fields_ = (
        ("products", _Product * PRODUCTS),
        ("norms", ctypes.c_void_p * NORMS),
        ("eps", ctypes.c_float * NORMS),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("step", Step),
    )


@dataclass(frozen=True, slots=True)
class Parts:
    """What a layer is made of. Linear layers: q, k, v, o, gate, up, down, packed, and their biases.
    Norms: before attention, after it, of queries, of keys; the last two may be None."""

    weights: tuple[Any, ...]
    biases: tuple[Tensor | None, ...]
    norms: tuple[Tensor | None, ...]
    eps: tuple[float, ...]
    dim: int
    scale: float


class Prepared:
    """The addresses of a layer's parts, found once for as long as the parts stay where they are."""

    def __init__(self) -> None:
        self._known: tuple[tuple[Any, ...], _Layer] | None = None

    def layer(self, parts: Parts) -> _Layer:
        """A copy for one call: several threads may be at it."""
        where = (*parts.weights, *(None if t is None else t.data_ptr() for t in _tensors(parts)))
        known = self._known
        if known is None or known[0] != where:
            known = self._known = (where, _layer(parts))
        return _Layer.from_buffer_copy(known[1])

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


def _tensors(parts: Parts) -> tuple[Tensor | None, ...]:
    return (*parts.biases, *parts.norms)


def _layer(parts: Parts) -> _Layer:
    layer = _Layer()
    for slot, weight, bias in zip(layer.products, parts.weights, parts.biases, strict=True):
        slot.n, slot.k = weight.out_features, weight.in_features
        if type(weight) is QuantizedWeight:
            slot.codes = weight.address
        else:
            slot.panels = weight.layout.words.data_ptr()
        if bias is not None:
            slot.bias, slot.bias_dtype = bias.data_ptr(), DTYPES[bias.dtype]
    for number, (norm, eps) in enumerate(zip(parts.norms, parts.eps, strict=True)):
        layer.norms[number] = None if norm is None else norm.data_ptr()
        layer.eps[number] = eps
    layer.width = parts.weights[0].in_features
    layer.step.dim, layer.step.scale = parts.dim, parts.scale
    layer.step.heads = parts.weights[0].out_features // parts.dim
    layer.step.groups = parts.weights[1].out_features // parts.dim
    return layer


def serves(weights: Sequence[Any], dtype: torch.dtype) -> bool:
    """Whether ``decode`` multiplies by all of these: rounded alike, or in bf16."""
    one = weights[0]
    if type(one) is QuantizedWeight:
        return one.address is not None and all(
            type(w) is QuantizedWeight and w.scheme == one.scheme for w in weights
        )
    return dtype is torch.bfloat16 and all(
        type(getattr(w, "layout", None)) is Panels for w in weights
    )


def decode(
    prepared: Prepared,
    parts: Parts,
    input: Tensor,
    turns: tuple[Tensor, Tensor],
    room: tuple[Tensor, Tensor, int],
    mask: Tensor | None,
) -> Tensor:
    """The layer's output, ``[batch, 1, width]`` as the input; the rest is as in ``step.attend``.

    ``MemoryError`` where there is none for the scratch; the cache is then a token short.
    """
    layer = prepared.layer(parts)
    out = torch.empty_like(input)
    layer.input, layer.output = input.data_ptr(), out.data_ptr()
    place(layer.step, input.dtype, turns, room, mask)
    library = native.library()
    if library.decode(ctypes.byref(layer), torch.get_num_threads(), library.kernels):
        raise MemoryError("no memory for the scratch of one decoded token")
    return out
