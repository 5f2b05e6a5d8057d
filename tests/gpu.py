"""Doubles of what only a GPU has, from documented behaviour: nothing here is the real thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

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


# What a kernel in a graph holds of the device, whatever it computes.
LAUNCH = 64 << 10
CAPTURING = "torch.cuda.is_current_stream_capturing"


class Recording(TorchDispatchMode):
    """What a capture does: nothing is computed, and what would be is written down.

    Operators without effects run once, to have the tensors that they make; those that write are
    only written down; a look at a value is an error, as on a stream that is captured.
    """

    def __init__(self, gpu: Gpu, graph: Graph) -> None:
        super().__init__()
        self.gpu, self.graph = gpu, graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        writes = [i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None]
        written = [i for i in writes if func._schema.arguments[i].alias_info.is_write]
        made = args[written[0]] if written else func(*args, **kwargs)
        if written or not writes:
            outputs = [t for t in tree_flatten(made)[0] if isinstance(t, Tensor)]
            self.gpu.take(self.graph, LAUNCH + sum(t.nbytes for t in outputs if not written))
            self.graph.steps.append((func, args, kwargs, None if written else outputs))
        return made


class Graph:
    """``torch.cuda.CUDAGraph``: the steps of a capture, and what it holds of the device."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.steps, self.held = gpu, [], 0
        gpu.alive.add(self)

    @torch.inference_mode()
    def replay(self) -> None:
        """Every step again, into the same tensors; a device knows no modes."""
        assert self in self.gpu.alive, "a graph was replayed after its reset"
        for func, args, kwargs, outputs in self.steps:
            made = [t for t in tree_flatten(func(*args, **kwargs))[0] if isinstance(t, Tensor)]
            for static, fresh in zip(outputs or (), made, strict=bool(outputs)):
                static.copy_(fresh)

    def reset(self) -> None:
        """Give everything back."""
        self.gpu.alive.discard(self)
        self.gpu.used -= self.held
        self.steps, self.held = [], 0


class Gpu:
    """``optimus.generation.cuda_graphs.Capture`` of a device with so many bytes for graphs."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room, self.used, self.most = room, 0, 0
        self.alive: set[Graph] = set()
        self.pools = self.released = 0
        self.busy = False

    def pool(self) -> int:
        """A new one."""
        self.pools += 1
        return self.pools

    def graph(self) -> Graph:
        """An empty one."""
        return Graph(self)

    def take(self, graph: Graph, count: int) -> None:
        """As an allocation does, it fails where there is no room."""
        if self.used + count > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        graph.held += count
        self.used += count
        self.most = max(self.most, self.used)

    def warm(self, work: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Run it."""
        return work()

    def record(
        self, graph: Graph, pool: int, work: Callable[[], Sequence[Tensor]]
    ) -> Sequence[Tensor]:
        """Under ``Recording``; graphs of one device are in one pool here."""
        assert pool == self.pools
        self.busy = True
        try:
            # transformers asks, before it looks at a mask's values.
            with Recording(self, graph), patch(CAPTURING, return_value=True):
                return work()
        finally:
            self.busy = False

    def release(self) -> None:
        """Count it."""
        self.released += 1

    def is_busy(self) -> bool:
        """Within ``record``."""
        return self.busy

    def synchronise(self) -> None:
        """Nothing is ever pending."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Gpu:
        return self
