"""What a model keeps for generation in static shapes: its graphs, and slates that wait."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from optimus.generation.buckets import Buckets, Graph
from optimus.generation.runner import Ready, Runner
from optimus.generation.slate import LayerShape, Slate, layer_shapes


class Station:
    """Graphs and slates of one model. Several threads may use it at once."""

    def __init__(self, make: Callable[[], Runner], buckets: Buckets) -> None:
        self.make, self.buckets = make, buckets
        self.runner = make()
        self.runs: Counter[Graph] = Counter()
        self.warm = 0
        self._lock = threading.Lock()
        self._graphs: dict[Graph, Ready] = {}
        self._free: list[Slate] = []
        self._home: tuple[torch.dtype, torch.device] | None = None
        self._shapes: tuple[LayerShape, ...] = ()
        self._said: set[str] = set()

    def use(self, buckets: Buckets) -> None:
        """From now on these; slates of others are let go when they come back."""
        with self._lock:
            if buckets != self.buckets:
                self.buckets = buckets
                self._drop()

    def take(self, model: nn.Module, batch: int) -> Slate:
        """A slate for so many rows that nobody else is using."""
        with self._lock:
            self._fit(model)
            for number, one in enumerate(self._free):
                if one.batch == batch:
                    return self._free.pop(number)
            shapes, buckets = self._shapes, self.buckets
        # Of inference mode's tensors nothing could be written outside of it.
        with torch.inference_mode(mode=False):
            slate = Slate(shapes, batch, buckets)
        self.runner.synchronise(slate)
        return slate

    def open(self, slate: Slate, rows: int, ends: list[int], pad: int) -> None:
        """As ``Slate.open``, and done before anything else: a lazy device would compile it with the
        first section of a prompt, and the others without."""
        slate.open(rows, ends, pad)
        self.runner.synchronise(slate)

    def give(self, slate: Slate, window: int) -> None:
        """Back for others; ``window``: how much of it was written to."""
        slate.clear(window)
        self.runner.synchronise(slate)
        with self._lock:
            if (slate.shapes, slate.buckets) == (self._shapes, self.buckets):
                self._free.append(slate)
            else:
                self.runner.forget(slate)

    def run(self, graph: Graph, model: nn.Module, slate: Slate) -> Tensor:
        """One graph on one slate; what ``compute`` says."""
        with self._lock:
            self.runs[graph] += 1
            if graph not in self._graphs:
                self._graphs[graph] = self.runner.prepare(graph)
            ready = self._graphs[graph]
        return ready(model, slate)

    def say(self, why: str) -> None:
        """Warn, once for each reason, that a call is transformers' own."""
        if why not in self._said:
            self._said.add(why)
            warnings.warn(
                f"generate falls back to transformers' own way, without static shapes: {why}.",
                stacklevel=2,
            )

    def _fit(self, model: nn.Module) -> None:
        """Ask for the shapes of layers; again where the model was cast or moved since."""
        first = next(model.parameters())
        if self._home != (first.dtype, first.device):
            self._drop()
            self._shapes = layer_shapes(model)
            self._home = first.dtype, first.device

    def _drop(self) -> None:
        self._graphs.clear()
        while self._free:
            self.runner.forget(self._free.pop())

    def __deepcopy__(self, memo: dict[int, Any]) -> Station:
        return Station(self.make, self.buckets)

    def __reduce__(self) -> tuple[Any, ...]:
        return Station, (self.make, self.buckets)
