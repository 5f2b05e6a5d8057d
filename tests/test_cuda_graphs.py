"""Captured graphs, on a double of the captures: answers, bounds, and what happens without room."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from gpu import LAUNCH, Gpu
from torch import Tensor, nn

from optimus.generation.buckets import Graph
from optimus.generation.cuda_graphs import Captured, Graphs, weights_of

pytestmark = pytest.mark.usefixtures("one_thread")


def scaled(x: Tensor) -> list[Tensor]:
    """Three kernels."""
    return [(x * 2 + 1).relu()]


def shape(n: int) -> Tensor:
    """An input of a shape of its own."""
    return torch.full((n,), float(n))


def test_a_shape_is_captured_at_its_second_call() -> None:
    """Eager, then captured and replayed; other inputs of the shape get answers of their own."""
    gpu = Gpu()
    graphs = Graphs(gpu)
    answers = [graphs.run("a", "b", scaled, torch.tensor([float(n)]))[0] for n in range(4)]
    assert [float(one) for one in answers] == [1.0, 3.0, 5.0, 7.0]
    counts = graphs.counts
    assert (counts.eager, counts.captured, counts.replayed) == (1, 1, 3)
    assert gpu.pools == 1


def test_effects_happen_once_a_call() -> None:
    """A static tensor that the work writes into moves by one a call: captures move nothing."""
    for ahead in (False, True):
        place, graphs = torch.zeros(1), Graphs(Gpu())
        for count in range(1, 6):
            (answer,) = graphs.run("a", "b", lambda place=place: [place.add_(1) * 10], ahead=ahead)
            assert float(place) == count
            assert float(answer) == 10 * count
        assert graphs.counts.eager == 1


def test_what_is_returned_is_the_callers() -> None:
    """A later replay does not change an earlier answer."""
    graphs = Graphs(Gpu())
    answers = [graphs.run("a", "b", scaled, torch.tensor([float(n)]))[0] for n in range(3)]
    answers[1].zero_()
    again = graphs.run("a", "b", scaled, torch.tensor([2.0]))[0]
    assert torch.equal(again, answers[2])


def test_shapes_dtypes_and_words_are_told_apart() -> None:
    """One graph each; another word for the same shape is another graph."""
    graphs = Graphs(Gpu())
    calls = [("x", shape(2)), ("x", shape(3)), ("y", shape(2)), ("x", shape(2).double())]
    for _ in range(2):
        for what, one in calls:
            assert torch.equal(graphs.run("a", what, scaled, one)[0], scaled(one)[0])
    assert len(graphs) == 4


def test_memory_is_bounded_over_many_shapes() -> None:
    """200 shapes leave as many graphs as are allowed, the last ones, and all in one pool."""
    gpu = Gpu()
    graphs = Graphs(gpu, most=4)
    for n in range(1, 201):
        for _ in range(2):
            assert torch.equal(graphs.run("a", "b", scaled, shape(n))[0], scaled(shape(n))[0])
    assert len(graphs) == len(gpu.alive) == 4
    assert (graphs.counts.evicted, gpu.pools) == (196, 1)
    assert gpu.most <= 4 * (3 * LAUNCH + 3 * shape(200).nbytes)
    before = graphs.counts.captured
    graphs.run("a", "b", scaled, shape(200))
    assert graphs.counts.captured == before


def test_the_one_used_longest_ago_goes() -> None:
    """A call keeps its graph young."""
    graphs = Graphs(Gpu(), most=2)
    for n in (1, 1, 2, 2, 1, 3, 3):
        graphs.run("a", "b", scaled, shape(n))
    before = graphs.counts.captured
    graphs.run("a", "b", scaled, shape(1))
    assert graphs.counts.captured == before
    graphs.run("a", "b", scaled, shape(2))
    assert graphs.counts.captured == before + 1


def test_out_of_memory_while_capturing() -> None:
    """What was taken is given back, that shape stays eager, and one warning says so."""
    gpu = Gpu(room=6 * LAUNCH)
    graphs = Graphs(gpu)
    small, large = torch.ones(4), torch.ones(40_000)
    for _ in range(2):
        graphs.run("a", "b", scaled, small)
    used = gpu.used
    graphs.run("a", "b", scaled, large)
    with pytest.warns(UserWarning, match=r"no graph was captured for inputs of \(40000,\)"):
        answer = graphs.run("a", "b", scaled, large)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert torch.equal(graphs.run("a", "b", scaled, large)[0], answer)
    assert torch.equal(answer, scaled(large)[0])
    assert (gpu.used, len(gpu.alive), gpu.released) == (used, 1, 1)
    assert graphs.counts.captured == 1
    gpu.room *= 100
    graphs.clear()
    assert (len(gpu.alive), gpu.used) == (0, 0)
    for _ in range(2):
        graphs.run("a", "b", scaled, large)
    assert len(graphs) == 1


def test_work_that_looks_at_a_value() -> None:
    """It cannot be captured, and is right without."""
    graphs = Graphs(Gpu())

    def looking(x: Tensor) -> list[Tensor]:
        return [x * 2 if float(x.sum()) > 0 else x * 3]

    graphs.run("a", "b", looking, torch.ones(2))
    with pytest.warns(UserWarning, match="not permitted when stream is capturing"):
        graphs.run("a", "b", looking, torch.ones(2))
    assert graphs.run("a", "b", looking, -torch.ones(2))[0].tolist() == [-3.0, -3.0]


def test_an_error_of_the_work_is_the_callers() -> None:
    """Nothing is known of a call that failed."""
    graphs = Graphs(Gpu())
    with pytest.raises(RuntimeError, match="size"):
        graphs.run("a", "b", lambda x: [x @ torch.ones(3)], torch.ones(2))
    with pytest.raises(ValueError, match="at least one graph"):
        Graphs(Gpu(), most=0)


def test_forgetting_an_owner_and_copying() -> None:
    """Its graphs go and no others; a copy begins with none."""
    gpu = Gpu()
    graphs = Graphs(gpu)
    for owner in ("a", "b"):
        for _ in range(2):
            graphs.run(owner, "", scaled, shape(3))
    assert len(copy.deepcopy(graphs)) == 0
    graphs.forget("a")
    assert len(graphs) == len(gpu.alive) == 1


def test_inference_mode_comes_and_goes() -> None:
    """What was captured within is replayed without, and the other way round."""
    for first in (True, False):
        graphs = Graphs(Gpu())
        for mode in (first, first, not first, first):
            with torch.inference_mode(mode):
                assert graphs.run("a", "b", scaled, torch.ones(2))[0].tolist() == [3.0, 3.0]
        assert graphs.counts.captured == 1


class Slate:
    """Tensors that stay where they are, and a place among them."""

    def __init__(self) -> None:
        self.slot, self.tokens = torch.zeros(1, dtype=torch.long), torch.zeros(1, 8)


class Inner:
    """A runner of the static generation, without a compiler."""

    def __init__(self) -> None:
        self.compilations = 0

    def prepare(self, graph: Graph) -> object:
        """Writes the model's answer at the slot, and moves on."""
        self.compilations += 1

        def ready(model: nn.Module, slate: Slate) -> Tensor:
            logits = model(torch.ones(1, 4)) * (slate.slot + 1)
            slate.tokens.index_copy_(1, slate.slot, logits.sum(-1, keepdim=True))
            slate.slot.add_(1)
            return logits

        return ready


def test_captured_runner() -> None:
    """Captured with the first call; every call has its effect once; new weights are new graphs."""
    gpu, model = Gpu(), nn.Linear(4, 2).requires_grad_(requires_grad=False)
    runner = Captured(Inner(), Graphs(gpu))
    ready = runner.prepare(Graph("prefill", 1, 1, 8))
    slate = Slate()
    logits = [ready(model, slate).clone() for _ in range(3)]
    assert int(slate.slot) == 3
    assert torch.allclose(torch.stack([one.sum() for one in logits]), slate.tokens[0, :3])
    assert torch.allclose(logits[2], 3 * logits[0])
    assert (runner.compilations, runner.graphs.counts.replayed) == (2, 2)
    model.weight = nn.Parameter(model.weight * 2, requires_grad=False)
    expected = model(torch.ones(1, 4)) * 4
    assert torch.allclose(ready(model, slate), expected)
    assert len(gpu.alive) == 1
    runner.forget(slate)
    assert not gpu.alive


def test_weights_of() -> None:
    """Writing to a weight or putting another in its place is seen."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    found = [weights_of(model)]
    with torch.no_grad():
        model[0].weight.mul_(2)
    found.append(weights_of(model))
    model[1].running_mean = torch.ones(2)
    found.append(weights_of(model))
    assert len(set(found)) == 3
    assert weights_of(model) == found[-1]
