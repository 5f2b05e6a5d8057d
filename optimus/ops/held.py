"""Weights that torch cannot see, and their product for compilers and autograd.

What is neither parameter nor buffer is shown to a compiler as a handle: a tensor of one number,
by which the custom op finds the weight while it lives.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

_handles = itertools.count(1)
_living: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def hold(weight: Any) -> Tensor:
    """A handle of its own for ``weight``, which stays its owner's."""
    number = next(_handles)
    _living[number] = weight
    return torch.tensor(number)


def find(handle: Tensor) -> Any:
    """The weight of a handle."""
    return _living[int(handle.item())]


@torch.library.custom_op("optimus::held_linear", mutates_args=())
def held_linear(input: Tensor, handle: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """The weight's ``matmul`` for compilers and autograd. ``handle`` is the weight's own.

    The gradient is that of the dense weight; what is rounded on the way passes it through.
    """
    product: Tensor = find(handle).matmul(input, bias)
    return product


@held_linear.register_fake
def _(input: Tensor, handle: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return input.new_empty(*input.shape[:-1], out_features)


@torch.library.custom_op("optimus::held_linear_input_grad", mutates_args=())
def _input_grad(grad: Tensor, handle: Tensor, in_features: int) -> Tensor:
    weight: Tensor = find(handle).dense()
    return grad @ weight.to(grad.dtype)


@_input_grad.register_fake
def _(grad: Tensor, handle: Tensor, in_features: int) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], in_features)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, handle, bias, _ = inputs
    ctx.save_for_backward(handle)
    ctx.in_features, ctx.has_bias = input.shape[-1], bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (handle,) = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    input_grad = _input_grad(grad, handle, ctx.in_features) if wanted[0] else None
    bias_grad = grad.flatten(0, -2).sum(0) if ctx.has_bias and wanted[2] else None
    return input_grad, None, bias_grad, None


held_linear.register_autograd(_backward, setup_context=_remember)
