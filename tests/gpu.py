"""Doubles of what only a GPU has, from documented behaviour: nothing here is the real thing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import optimus

FEATURES = frozenset({"int8-weights", "int4-tiles", "fp8-rows", "packed-attention"})
# A GPU whose tensors are on the CPU, where the doubles are.
GPU = optimus.Backend("cuda", "cpu", "a double", FEATURES)


def pack(pairs: Tensor, inner: int) -> Tensor:
    """``_convert_weight_to_int4pack``: ``[n, k / 2]`` bytes, the even column in the high half.

    The layout of torch's ``matrix_to_m16n8k16_Bint4_layout``: lane ``t`` of tile ``(n, k)`` holds
    of row ``8 n + t / 4`` the bytes ``t % 4`` and ``t % 4 + 4`` of two tiles of 16 numbers side by
    side; in a word the high halves of the four bytes come first, then the low ones.
    """
    rows, width = pairs.shape[0], pairs.shape[1] * 2
    tiles = pairs.to(torch.int64).view(rows // 8, 8, width // (16 * inner), inner // 2, 2, 2, 4)
    four = tiles.permute(0, 2, 1, 6, 3, 4, 5).reshape(*lanes(rows, width, inner), 4)
    shifts = 4 * torch.arange(4)
    word = ((four >> 4) << shifts).sum(-1) + ((four & 15) << (shifts + 16)).sum(-1)
    return word.where(word < 1 << 31, word - (1 << 32)).to(torch.int32)


def lanes(rows: int, width: int, inner: int) -> tuple[int, int, int, int]:
    """The shape of packed words: tiles of rows, runs of tiles of k, lanes, words a lane."""
    return rows // 8, width // (16 * inner), 32, inner // 2


def unpack(words: Tensor) -> Tensor:
    """The codes ``[n, k]`` of what ``pack`` made."""
    high, runs, _, half = words.shape
    nibbles = (words.to(torch.int64)[..., None] >> (4 * torch.arange(8))) & 15
    # [tile, run, row, lane of 4, word, first or second half of the byte, tile of 16, place]
    parts = nibbles.view(high, runs, 8, 4, half, 2, 2, 2)
    return parts.permute(0, 2, 1, 4, 6, 7, 3, 5).reshape(high * 8, runs * half * 32)


def multiply(input: Tensor, words: Tensor, group: int, scales: Tensor) -> Tensor:
    """``_weight_int4pack_mm``: ``(code - 8) * scale + zero``, in bf16, and summed in fp32."""
    assert input.dtype is torch.bfloat16
    assert input.is_contiguous()
    codes = unpack(words).view(words.shape[0] * 8, -1, group).float()
    scale, zero = (one.t()[..., None].float() for one in scales.unbind(-1))
    dense = ((codes - 8) * scale + zero).to(torch.bfloat16).flatten(1)
    return (input.float() @ dense.float().t()).to(torch.bfloat16)


@contextmanager
def four_bit_tiles() -> Iterator[None]:
    """torch's 4-bit operators on the CPU, where it has none."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_convert_weight_to_int4pack", pack, "CPU")
        library.impl("_weight_int4pack_mm", multiply, "CPU")
        yield
