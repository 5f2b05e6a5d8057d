"""What the fused kernels of attention take, and where their gradients are wrong."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from optimus.ops.scores import MASKED


def widened(tensor: Tensor, width: int) -> Tensor:
    """Zeros in new columns change no product; the kernels want one width, densely laid."""
    missing = width - tensor.shape[-1]
    if missing:
        return pad(tensor, (0, missing))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def spoils_gradients(bias: Tensor) -> bool:
    """Whether the kernel would not give the right gradients with this bias, or gives none of it.

    Of a bias that is learned the kernels have no gradient, and torch takes its slow path. Of a row
    whose keys are all masked they keep a logarithm that has swallowed the number of keys, and go
    back through weights that sum to that number instead of to one. While tracing, that cannot be
    looked up.
    """
    if bias.requires_grad or torch.compiler.is_compiling():
        return True
    return bool((bias.amax(-1) <= MASKED).any())
