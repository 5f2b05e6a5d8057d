"""Graphs on XLA, which records what is asked of it and compiles what was recorded.

A graph here is what is recorded between two launches. Nothing else may be pending then, or it would
be another graph. Source: docs/source/learn/pytorch-on-xla-devices.md of pytorch/xla.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from optimus.core.backend import is_available, launch
from optimus.core.errors import BackendUnavailableError
from optimus.generation.buckets import Graph
from optimus.generation.runner import Ready
from optimus.generation.slate import Slate
from optimus.generation.steps import compute
from optimus.ops.spmd import devices, shard, unfit_devices

DEVICE = torch.device("xla")
# Where torch_xla looks for it, at its first computation.
CACHE = "XLA_PERSISTENT_CACHE_PATH"


def compiled() -> int:
    """How many graphs this process has compiled for XLA, since its counters were last cleared."""
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value("UncachedCompile") or 0


class Lazy:
    """One launch a graph. What is written into a slate from the host is data and not compiled."""

    # A look stops the host, which is otherwise ahead of the device by as many tokens.
    looks = 8
    lazy = True

    def __init__(self) -> None:
        self.compilations = 0

    def prepare(self, graph: Graph) -> Ready:
        """Compiled at the first call."""

        def run(model: nn.Module, slate: Slate) -> Tensor:
            self.synchronise(slate)
            with self._counted():
                logits = compute(graph, model, slate)
                _launch(slate)
            return logits

        return run

    def synchronise(self, slate: Slate) -> None:
        """Launch what is pending; the device may still be at it."""
        with self._counted():
            _launch(slate)

    def forget(self, slate: Slate) -> None:
        """Graphs take any slate of their shape."""

    @contextmanager
    def _counted(self) -> Iterator[None]:
        before = compiled()
        yield
        self.compilations += compiled() - before


def _launch(slate: Slate) -> None:
    """On several devices heads are split over them, if they can be, and all else is everywhere.

    A program lays out what it writes as it likes, and the next one to read that would be another.
    """
    if unfit_devices() is None:
        for one in (*slate.keys, *slate.values):
            shard(one, 1 if one.shape[1] % devices() == 0 else None)
        for one in slate.state():
            shard(one, None)
    launch(DEVICE)


def xla_cache(folder: str | Path) -> Path:
    """Keep what this process compiles for XLA in ``folder``, and find it there in the next one.

    For all of the process, and until it ends: torch_xla has no way back, so that no recipe does it.
    Programs wait in a folder of their own for each torch_xla, which is returned. Raises
    ``BackendUnavailableError`` where there is no torch_xla, or where it has computed already.
    """
    if not is_available("xla"):
        raise BackendUnavailableError("xla_cache needs torch_xla, which is not installed.")
    import torch_xla
    import torch_xla.runtime as runtime

    place = Path(folder).expanduser().resolve() / f"torch_xla-{torch_xla.__version__}"
    place.mkdir(parents=True, exist_ok=True)
    if os.environ.get(CACHE) == str(place):
        return place
    if torch_xla._XLAC._xla_computation_cache_is_initialized():
        raise BackendUnavailableError(
            "XLA has computed in this process, or keeps its programs elsewhere, and reads where to "
            "keep them once. Call xla_cache before anything is computed on the device."
        )
    runtime.initialize_cache(str(place))
    return place
