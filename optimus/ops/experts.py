"""The product of routed rows: every row of the input with the weight of its own expert.

Rows come sorted by expert, so that each weight is read at most once, and those that no row was
routed to are not read at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from optimus.ops.held import find, hold
from optimus.ops.quantized import QuantizedWeight


class RoutedWeight:
    """One ``[out, in]`` weight an expert."""

    def __init__(self, experts: Sequence[QuantizedWeight]) -> None:
        self.experts = tuple(experts)
        self.out_features = self.experts[0].out_features
        self.in_features = self.experts[0].in_features
        self.dtype = self.experts[0].dtype
        self.handle = hold(self)

    def matmul(self, input: Tensor, ends: Tensor) -> Tensor:
        """``[rows, in]``, of which expert e has those up to ``ends[e]`` -> ``[rows, out]``.

        Rows beyond the last end are nobody's, and come out as zeros.
        """
        out = input.new_zeros(input.shape[0], self.out_features)
        for expert, rows in self._routed(ends):
            out[rows] = expert.matmul(input[rows], None)
        return out

    def input_gradient(self, grad: Tensor, ends: Tensor) -> Tensor:
        """``[rows, out] -> [rows, in]``."""
        out = grad.new_zeros(grad.shape[0], self.in_features)
        for expert, rows in self._routed(ends):
            out[rows] = grad[rows] @ expert.dense().to(grad.dtype)
        return out

    def dense(self) -> Tensor:
        """The rounded weights ``[experts, out, in]``, newly allocated."""
        return torch.stack([expert.dense() for expert in self.experts])

    def _routed(self, ends: Tensor) -> Iterator[tuple[QuantizedWeight, slice]]:
        start = 0
        for expert, end in zip(self.experts, ends.tolist(), strict=True):
            if end > start:
                yield expert, slice(start, end)
            start = end

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(self.experts)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.experts,)


@torch.library.custom_op("optimus::routed_linear", mutates_args=())
def routed_linear(input: Tensor, handle: Tensor, ends: Tensor, out_features: int) -> Tensor:
    """``RoutedWeight.matmul`` for compilers and autograd. ``handle`` is the weight's own."""
    return find(handle).matmul(input, ends)


@routed_linear.register_fake
def _(input: Tensor, handle: Tensor, ends: Tensor, out_features: int) -> Tensor:
    return input.new_empty(input.shape[0], out_features)


@torch.library.custom_op("optimus::routed_linear_input_grad", mutates_args=())
def _input_grad(grad: Tensor, handle: Tensor, ends: Tensor, in_features: int) -> Tensor:
    return find(handle).input_gradient(grad, ends)


@_input_grad.register_fake
def _(grad: Tensor, handle: Tensor, ends: Tensor, in_features: int) -> Tensor:
    return grad.new_empty(grad.shape[0], in_features)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, handle, ends, _ = inputs
    ctx.save_for_backward(handle, ends)
    ctx.in_features = input.shape[-1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    handle, ends = ctx.saved_tensors
    return _input_grad(grad, handle, ends, ctx.in_features), None, None, None


routed_linear.register_autograd(_backward, setup_context=_remember)
