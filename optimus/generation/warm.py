"""Compiling ahead, and counting what was compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from optimus.core.paths import unwrap
from optimus.generation.buckets import Buckets, Graph
from optimus.generation.static import positions_of, station_of
from optimus.generation.station import Station

# Told of each graph: how many are done, how many there are, and its name.
Progress = Callable[[int, int, str], None]


def warm_up(
    model: nn.Module, buckets: Buckets | None = None, *, progress: Progress | None = None
) -> int:
    """Compile every graph of ``buckets`` ahead; how many there are.

    Without ``buckets`` those that the model has. What ``compilations`` counts begins after it.
    Raises ``PlanError`` where the model does not generate in static shapes.
    """
    root = unwrap(model)
    station = station_of(root)
    if buckets is not None:
        station.use(buckets.within(positions_of(root)))
    graphs = list(station.buckets.graphs())
    for done, graph in enumerate(graphs):
        if progress is not None:
            progress(done, len(graphs), graph.name)
        _rehearse(root, station, graph)
    if progress is not None:
        progress(len(graphs), len(graphs), "ready")
    station.runs.clear()
    station.warm = station.runner.compilations
    return len(graphs)


@torch.inference_mode(mode=False)
@torch.no_grad()
def _rehearse(model: nn.Module, station: Station, graph: Graph) -> None:
    """A call of which the last graph is this one, with all that is done around it."""
    slate = station.take(model, graph.batch)
    station.open(slate, graph.batch, [], 0)
    if graph.kind == "prefill":
        ids = torch.zeros(graph.batch, graph.length, dtype=torch.long)
        slate.load(graph.length, ids, ids, ids == 0)
    station.run(graph, model, slate)
    slate.is_done()
    slate.written()
    slate.put(torch.zeros(graph.batch, dtype=torch.long))
    # By itself, as before a decode: a lazy device would compile it with what comes next.
    station.runner.synchronise(slate)
    station.give(slate, graph.window)


def compilations(model: nn.Module) -> int:
    """How many graphs were compiled since the warm-up ended; since ever where there was none."""
    station = station_of(unwrap(model))
    return station.runner.compilations - station.warm


def runs(model: nn.Module) -> dict[Graph, int]:
    """How often each graph ran since the warm-up ended."""
    return dict(station_of(unwrap(model)).runs)
