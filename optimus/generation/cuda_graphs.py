"""Work that is captured once a shape and replayed, in memory that is bounded.

A captured graph keeps what its kernels were given: some 64 KB of device memory a launch, and every
tensor that it made. Whoever captures each shape that comes runs out of it. Here all graphs share
one pool, of which each takes what the largest needs; only so many are kept, and the one that was
used longest ago makes room for the next. Sharing is safe because what a replay made is copied out
before the next begins, and replays are in one order on one stream (torch's CUDA semantics, "Sharing
memory across captures").

Nothing here has run on a GPU. ``Capture`` is what is needed of one, ``Cuda`` says it in torch's
words, and the tests bring a double.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from optimus.generation.buckets import Graph
from optimus.generation.runner import Compiled, Eager, Ready, Runner
from optimus.generation.slate import Slate

# Of whatever shapes come; and of those that somebody chose, for each slate that is in use.
MOST, BUCKETS = 16, 96
# A product of one row becomes a sum, with whatever its weight is made of fused into it.
TUNED = {"coordinate_descent_tuning": True}

# How many shapes are known for each graph that is kept.
REMEMBERED = 64

Work = Callable[..., Sequence[Tensor]]
_Key = tuple[Hashable, Hashable, Hashable]


class Recorded(Protocol):
    """A graph (``torch.cuda.CUDAGraph``)."""

    def replay(self) -> None:
        """Run it again on whatever is in its tensors now."""

    def reset(self) -> None:
        """Give back what it holds of the pool and of the device."""


class Capture(Protocol):
    """What capturing needs of a device."""

    def pool(self) -> Any:
        """A handle of memory that graphs may share."""

    def graph(self) -> Recorded:
        """A graph with nothing in it."""

    def warm(self, work: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Run the work as it will be captured, so that nothing is set up within the capture."""

    def record(
        self, graph: Recorded, pool: Any, work: Callable[[], Sequence[Tensor]]
    ) -> Sequence[Tensor]:
        """Capture ``work`` into ``graph``; what it returned is filled by each replay."""

    def release(self) -> None:
        """Give memory that nobody uses back to the device."""

    def is_busy(self) -> bool:
        """Whether somebody's capture is under way in this thread."""

    def synchronise(self) -> None:
        """Wait until the device has done all that it was asked."""


class Cuda:
    """``torch.cuda``, on the current device."""

    def __init__(self) -> None:
        self._side: torch.cuda.Stream | None = None

    def _stream(self) -> torch.cuda.Stream:
        """One stream for all: graphs that share a pool have to be captured on the same."""
        if self._side is None:
            self._side = torch.cuda.Stream()
        return self._side

    def pool(self) -> Any:
        """A new pool."""
        return torch.cuda.graph_pool_handle()

    def graph(self) -> Recorded:
        """An empty graph."""
        made: Recorded = torch.cuda.CUDAGraph()
        return made

    def warm(self, work: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """On the stream of the captures, between what the caller's did before and does after."""
        here, side = torch.cuda.current_stream(), self._stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            made = work()
        here.wait_stream(side)
        for tensor in made:
            tensor.record_stream(here)
        return made

    def record(
        self, graph: Recorded, pool: Any, work: Callable[[], Sequence[Tensor]]
    ) -> Sequence[Tensor]:
        """Of this thread alone: what others do meanwhile is none of its business."""
        capturing = torch.cuda.graph(
            graph,  # type: ignore[arg-type]
            pool=pool,
            stream=self._stream(),
            capture_error_mode="thread_local",
        )
        with capturing:
            return work()

    def release(self) -> None:
        """Of the allocator's cache."""
        torch.cuda.empty_cache()

    def is_busy(self) -> bool:
        """On the current stream."""
        return torch.cuda.is_current_stream_capturing()

    def synchronise(self) -> None:
        """Of the current device."""
        torch.cuda.synchronize()

    def __deepcopy__(self, memo: dict[int, Any]) -> Cuda:
        return Cuda()


@dataclass(eq=False, slots=True)
class _Graph:
    """A captured shape: the tensors that it reads and those that it fills."""

    recorded: Recorded
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(slots=True)
class Counts:
    """What a ``Graphs`` did: calls without a graph, captures, replays, and graphs let go."""

    eager: int = 0
    captured: int = 0
    replayed: int = 0
    evicted: int = 0


@dataclass(eq=False)
class Graphs:
    """Calls of functions of tensors, replayed from the second call of a shape on.

    most: how many graphs are kept. ``Work`` takes tensors and returns tensors; it may write into
    tensors that stay where they are (a static cache), and does so once a call. The first call of a
    shape runs it as it is. A shape that cannot be captured stays eager; a warning says so once.
    Threads take turns.
    """

    capture: Capture = field(default_factory=Cuda)
    most: int = MOST
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ValueError(f"most={self.most}: at least one graph has to be kept.")
        self._lock = threading.RLock()
        self._graphs: OrderedDict[_Key, _Graph] = OrderedDict()
        self._seen: OrderedDict[_Key, bool] = OrderedDict()
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    @torch.no_grad()
    def run(
        self, owner: Hashable, what: Hashable, work: Work, *inputs: Tensor, ahead: bool = False
    ) -> tuple[Tensor, ...]:
        """What ``work(*inputs)`` returns, newly allocated.

        ``owner`` and ``what``: all that decides what ``work`` does besides shapes and dtypes; what
        an owner has is let go by ``forget``. ``ahead``: capture with the first call, not before the
        second.
        """
        shapes = tuple((one.shape, one.stride(), one.dtype, one.device) for one in inputs)
        key = (owner, what, shapes)
        with self._lock:
            if key not in self._graphs and self._seen.get(key, False):
                self._capture(key, work, inputs)
            if key in self._graphs:
                return self._replay(key, inputs)
            made = self._eager(key, work, inputs)
            if ahead and self._seen[key]:
                self._capture(key, work, inputs)
            return made

    def forget(self, owner: Hashable) -> None:
        """Let go of what that owner has."""
        with self._lock:
            for key in [key for key in self._seen if key[0] == owner]:
                del self._seen[key]
                if key in self._graphs:
                    self._graphs.pop(key).recorded.reset()
            self._tidy()

    def clear(self) -> None:
        """Let every graph go, and try again what could not be captured."""
        with self._lock:
            for owner in {key[0] for key in self._seen}:
                self.forget(owner)

    def _eager(self, key: _Key, work: Work, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.counts.eager += 1
        if key in self._seen:  # and cannot be captured
            return tuple(work(*inputs))
        made = tuple(self.capture.warm(lambda: work(*inputs)))
        self._seen[key] = True
        # Shapes that come once must not fill the memory either.
        while len(self._seen) > REMEMBERED * self.most:
            oldest, _ = self._seen.popitem(last=False)
            if oldest in self._graphs:
                self._graphs.pop(oldest).recorded.reset()
        return made

    def _capture(self, key: _Key, work: Work, inputs: tuple[Tensor, ...]) -> None:
        """Into ``_graphs``; where it cannot be, all that it had taken is given back."""
        while len(self._graphs) >= self.most:
            _, oldest = self._graphs.popitem(last=False)
            oldest.recorded.reset()
            self.counts.evicted += 1
        recorded = self.capture.graph()
        own: tuple[Tensor, ...] = ()
        try:
            if self._pool is None:
                self._pool = self.capture.pool()
            own = _owned(inputs)
            made = tuple(self.capture.record(recorded, self._pool, lambda: work(*own)))
            self._graphs[key] = _Graph(recorded, own, made)
            self.counts.captured += 1
            return
        except RuntimeError as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        # Not in the handler, whose traceback holds on to what the work had made.
        own = ()
        self._seen[key] = False
        recorded.reset()
        self._tidy()
        shapes = ", ".join(str(tuple(one.shape)) for one in inputs)
        warnings.warn(
            f"no graph was captured for {f'inputs of {shapes}' if shapes else key[1]} ({reason}); "
            "it runs without one. Free memory and call clear() to try again.",
            stacklevel=4,
        )

    def _tidy(self) -> None:
        """A pool without graphs is given back, and what is free of it goes to the device."""
        if not self._graphs:
            self._pool = None
        self.capture.release()

    def _replay(self, key: _Key, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self._graphs.move_to_end(key)
        graph = self._graphs[key]
        for own, one in zip(graph.inputs, inputs, strict=True):
            own.copy_(one)
        graph.recorded.replay()
        self.counts.replayed += 1
        return tuple(one.clone() for one in graph.outputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        return Graphs(self.capture, self.most)

    def __reduce__(self) -> tuple[Any, ...]:
        return Graphs, (self.capture, self.most)


def _owned(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copies outside of the pool, where no other graph writes, and for every grad mode."""
    with torch.inference_mode(mode=False):
        return tuple(torch.empty_like(one).copy_(one) for one in inputs)


def weights_of(model: nn.Module) -> int:
    """Changes when a weight or buffer is put elsewhere, or a weight written to: what was captured
    then reads what is no longer there.
    """
    found: list[Any] = []
    for module in model.modules():
        found.append(type(module))
        found += [
            (one.data_ptr(), 0 if one.is_inference() else one._version)
            for one in module._parameters.values()
            if one is not None
        ]
        found += [one.data_ptr() for one in module._buffers.values() if one is not None]
    return hash(tuple(found))


class Captured:
    """A runner of static generation whose graphs are captured and replayed.

    ``inner`` makes what is captured: compiled functions, or the plain ones. ``compilations`` are
    its own, and the captures.
    """

    lazy = False
    # A look waits for the device, and costs as much as some tokens.
    looks = 8

    def __init__(self, inner: Runner, graphs: Graphs | None = None) -> None:
        self.inner = inner
        self.graphs = Graphs(most=BUCKETS) if graphs is None else graphs
        self.compilations = 0
        self._weights: int | None = None

    def prepare(self, graph: Graph) -> Ready:
        """What runs ``graph`` on a slate, captured with its first call."""
        ready = self.inner.prepare(graph)

        def run(model: nn.Module, slate: Slate) -> Tensor:
            # Every answer begins with a prompt, and weights are not changed within one.
            if graph.kind == "prefill":
                self._check(model)
            (logits,) = self.graphs.run(
                id(slate), graph.name, lambda: (ready(model, slate),), ahead=True
            )
            self.compilations = self.inner.compilations + self.graphs.counts.captured
            return logits

        return run

    def synchronise(self, slate: Slate) -> None:
        """Wait for the device."""
        self.graphs.capture.synchronise()

    def forget(self, slate: Slate) -> None:
        """Let go of the graphs on that slate."""
        self.graphs.forget(id(slate))

    def _check(self, model: nn.Module) -> None:
        found = weights_of(model)
        if self._weights not in (None, found):
            self.graphs.clear()
        self._weights = found


def compiled() -> Captured:
    """Buckets by inductor, captured."""
    return Captured(Compiled(config_patches=TUNED))


def plain() -> Captured:
    """Buckets operator by operator, captured."""
    return Captured(Eager())
