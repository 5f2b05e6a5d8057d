"""Linear layers on a weight in oneDNN's blocked layout.

Packing is lossless: the blocked tensor holds the same numbers in another order, and ``dense``
gives the original bits back. The blocked tensor is opaque to torch (no storage, no copy, no
``.to``), so it is held by ``PackedWeight``, which is neither parameter nor buffer, and shown to
compilers through a custom op that takes a handle.

Source: torch/_inductor/mkldnn_lowerings.py uses the same two ops when it freezes a graph.
"""

from __future__ import annotations

import functools
from typing import Any, Self

import torch
from torch import Tensor

from optimus.ops.held import hold

# A hint only: any number of rows is served. Measured on Cascade Lake in fp32, a blocking chosen for
# a few dozen rows is within 3 % of the best at every number of rows; one chosen for 1 loses 5 %.
ROWS_HINT = 64


@functools.cache
def rows_hint(dtype: torch.dtype) -> int:
    """How many rows the blocking is chosen for.

    Where bf16 is emulated, products are alike under every blocking, and the one for a single row
    is packed 2x and unpacked 5x faster (Cascade Lake, 5632 x 2048: 7 ms against 40).
    """
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return 1 if dtype is torch.bfloat16 and not native else ROWS_HINT


class PackedWeight:
    """One weight ``[out, in]`` in blocked layout. Copies and pickles by way of the dense tensor."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        with torch.no_grad():
            self.blocked = torch.ops.mkldnn._reorder_linear_weight.default(
                weight.detach().contiguous(), rows_hint(weight.dtype)
            )
        self.handle = hold(self)

    def dense(self) -> Tensor:
        """The original ``[out, in]`` tensor, bit for bit, newly allocated."""
        return self.blocked.to_dense()

    def matmul(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """``input [..., in] @ weightᵀ + bias``. Not differentiable; see ``held_linear``."""
        return torch.ops.mkldnn._linear_pointwise.default(input, self.blocked, bias, "none", [], "")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(self.dense())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.dense(),)
