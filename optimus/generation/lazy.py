"""Graphs on XLA, which records what is asked of it and compiles what was recorded.

A graph here is what is recorded between two launches. Nothing else may be pending then, or it would
be another graph. Source: docs/source/learn/pytorch-on-xla-devices.md of pytorch/xla.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
            self.synchronise()
            with self._counted():
                logits = compute(graph, model, slate)
                _pin(slate)
                launch(DEVICE)
            return logits

        return run

    def synchronise(self) -> None:
        """Launch what is pending; the device may still be at it."""
        with self._counted():
            launch(DEVICE)

    def forget(self, slate: Slate) -> None:
        """Graphs take any slate of their shape."""

    @contextmanager
    def _counted(self) -> Iterator[None]:
        before = compiled()
        yield
        self.compilations += compiled() - before


def _pin(slate: Slate) -> None:
    """Several devices: heads are split over them, if they can be, and all else is everywhere.

    A program lays out what it writes as it likes, and the next one to read that would be another.
    """
    if unfit_devices() is not None:
        return
    for one in (*slate.keys, *slate.values):
        shard(one, 1 if one.shape[1] % devices() == 0 else None)
    for one in slate.state():
        shard(one, None)


def moved(value: Any, device: torch.device) -> Any:
    """Tensors, those of tuples and those of an output of transformers on ``device``; all else as it
    is, and a cache where it is.
    """
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(one, device) for one in value)
    if isinstance(value, MutableMapping):
        for key in value:
            value[key] = moved(value[key], device)
    return value


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
    if os.environ.get(CACHE) == str(place):
        return place
    if torch_xla._XLAC._xla_computation_cache_is_initialized():
        raise BackendUnavailableError(
            "XLA has computed in this process, or keeps its programs elsewhere, and reads where to "
            "keep them once. Call xla_cache before anything is computed on the device."
        )
    place.mkdir(parents=True, exist_ok=True)
    runtime.initialize_cache(str(place))
    return place
