"""Linear layers on a weight in another layout: oneDNN's blocked one, or panels of our own.

Packing is lossless: the packed tensor holds the same numbers in another order, and ``dense`` gives
the original bits back. A packed weight is neither parameter nor buffer, and is shown to compilers
through a custom op that takes a handle.

Source of the oneDNN ops: torch/_inductor/mkldnn_lowerings.py, which uses them to freeze a graph.
"""

from __future__ import annotations

import functools
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from optimus.ops import native
from optimus.ops.held import hold

# A hint only: any number of rows is served. Measured on Cascade Lake in fp32, a blocking chosen for
# a few dozen rows is within 3 % of the best at every number of rows; one chosen for 1 loses 5 %.
ROWS_HINT = 64
# Rows of a panel, and the tiles that the last one is made of: as in native/bf16.c.
PANEL, TILE = 64, 16


@functools.cache
def rows_hint(dtype: torch.dtype) -> int:
    """How many rows the blocking is chosen for.

    Where bf16 is emulated, products are alike under every blocking, and the one for a single row
    is packed 2x and unpacked 5x faster (Cascade Lake, 5632 x 2048: 7 ms against 40).
    """
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return 1 if dtype is torch.bfloat16 and not native else ROWS_HINT


class Blocked:
    """oneDNN's layout. Opaque to torch: no storage, no copy, no ``.to``."""

    def __init__(self, weight: Tensor) -> None:
        self.tensor = torch.ops.mkldnn._reorder_linear_weight.default(
            weight.contiguous(), rows_hint(weight.dtype)
        )

    def dense(self) -> Tensor:
        """As ``PackedWeight.dense``."""
        return self.tensor.to_dense()

    def matmul(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """As ``PackedWeight.matmul``."""
        if bias is not None:
            # The op reads an expanded bias beyond its end.
            bias = bias.contiguous()
        return torch.ops.mkldnn._linear_pointwise.default(input, self.tensor, bias, "none", [], "")


class Panels:
    """The layout of ``native/bf16.c``: ``[k / 2][64][2]`` for every 64 rows, zeros at the ends."""

    def __init__(self, weight: Tensor) -> None:
        self.shape = weight.shape
        self.padding = (-weight.shape[0] % TILE, -weight.shape[1] % 2)
        # Padded or not, this is a copy, which starts at a whole word; a view need not.
        padded = pad(weight.contiguous(), (0, self.padding[1], 0, self.padding[0]))
        self.words = torch.empty(padded.numel() // 2, dtype=torch.int32)
        for rows, panels in self._parts(padded):
            panels.copy_(rows)

    def _parts(self, padded: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The whole panels, and the narrower one behind them: as rows, and as they are kept."""
        pairs = padded.view(torch.int32)
        count, width = pairs.shape
        whole, left = count // PANEL, count % PANEL
        rows = pairs.split([whole * PANEL, left])
        kept = self.words.split([whole * PANEL * width, left * width])
        return [
            (part.view(panels, high, width).transpose(1, 2), words.view(panels, width, high))
            for part, words, panels, high in zip(rows, kept, (whole, 1), (PANEL, left), strict=True)
        ]

    def dense(self) -> Tensor:
        """As ``PackedWeight.dense``."""
        (rows, width), (below, beside) = self.shape, self.padding
        padded = torch.empty(rows + below, width + beside, dtype=torch.bfloat16)
        for part, panels in self._parts(padded):
            part.copy_(panels)
        return padded[:rows, :width].clone() if below or beside else padded

    def matmul(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """As ``PackedWeight.matmul``."""
        if input.dtype is not torch.bfloat16 or input.shape[-1] != self.shape[1]:
            raise ValueError(
                f"a linear layer packed in bf16 takes [..., {self.shape[1]}] of bfloat16, and was "
                f"given {tuple(input.shape)} of {input.dtype}"
            )
        return native.linear_bf16(self.words, self.shape[0], input, bias)


def layout_for(dtype: torch.dtype) -> type[Blocked | Panels]:
    """Which layout is faster on this processor.

    Ours in bf16 where there is AVX512-BF16 and no AMX: with that, products of many rows are several
    times faster, and only oneDNN has them.
    """
    ours = native.multiplies_bf16() and not torch.cpu._is_amx_tile_supported()
    return Panels if dtype is torch.bfloat16 and ours else Blocked


class PackedWeight:
    """One weight ``[out, in]`` in another layout. Copies and pickles by way of the dense tensor."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        # Grad mode off, inference mode off: the packed tensor must be usable in either.
        with torch.inference_mode(mode=False), torch.no_grad():
            self.layout = layout_for(weight.dtype)(weight.detach())
        self.handle = hold(self)

    def dense(self) -> Tensor:
        """The original ``[out, in]`` tensor, bit for bit, newly allocated."""
        return self.layout.dense()

    def matmul(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """``input [..., in] @ weightᵀ + bias``. Not differentiable; see ``held_linear``."""
        return self.layout.matmul(input, bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(self.dense())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.dense(),)
