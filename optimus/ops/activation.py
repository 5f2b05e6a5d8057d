"""Activation functions in one pass over memory, by ``native/activation.c``. Not differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from optimus.ops import native

# The kinds of ``native/activation.h``.
GELU_TANH, GELU_QUICK = 0, 1


def activate(input: Tensor, kind: int) -> Tensor:
    """The activation of every number of ``input``, which is contiguous, of a dtype of ``native``.

    ``GELU_TANH`` and ``GELU_QUICK`` are the two approximations of Hendrycks and Gimpel 2016, arXiv
    1606.08415. ``native.steps()`` must be true.
    """
    out = torch.empty_like(input)
    native.library().activate(
        input.data_ptr(),
        out.data_ptr(),
        input.numel(),
        kind,
        native.DTYPES[input.dtype],
        torch.get_num_threads(),
    )
    return out
