"""How a graph is run: as it is, or compiled."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from optimus.generation.buckets import Graph
from optimus.generation.slate import Slate
from optimus.generation.steps import compute

# What a graph became. It reads and writes the slate in place; logits as ``compute`` says.
Ready = Callable[[nn.Module, Slate], Tensor]


class Runner(Protocol):
    """One way to run graphs. A model that is copied gets a new one.

    ``compilations``: how many graphs were compiled so far, again for the same one included.
    ``looks``: after how many tokens to look at whether all rows are finished: a look waits for
    the device. ``lazy``: what is done on the device outside of a graph is compiled, too, so that
    prompts and choices of tokens stay on the CPU.
    """

    compilations: int
    looks: int
    lazy: bool

    def prepare(self, graph: Graph) -> Ready:
        """Something to call in place of ``compute``; it may wait with compiling until then."""

    def synchronise(self, slate: Slate) -> None:
        """Come back when everything asked for of the slate is done."""

    def forget(self, slate: Slate) -> None:
        """The slate is not used any more: drop what was made for its addresses."""


class Eager:
    """Operator by operator. A shape that was not there before counts as a graph compiled."""

    looks = 1
    lazy = False

    def __init__(self) -> None:
        self.compilations = 0

    def prepare(self, graph: Graph) -> Ready:
        """``compute`` itself."""
        self.compilations += 1
        return _function(graph)

    def synchronise(self, slate: Slate) -> None:
        """Nothing is ever pending."""

    def forget(self, slate: Slate) -> None:
        """Nothing was made for it."""


class Compiled:
    """By ``torch.compile``, each graph without a break and for its one shape."""

    looks = 1
    lazy = False

    def __init__(self, backend: str = "inductor") -> None:
        self.compilations, self.backend = 0, backend

    def prepare(self, graph: Graph) -> Ready:
        """Compiled at the first call."""
        ready = torch.compile(_function(graph), fullgraph=True, dynamic=False, backend=self._count)
        return cast(Ready, ready)

    def _count(self, module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.compilations += 1
        compile_graph: Any = torch._dynamo.lookup_backend(self.backend)
        return cast(Callable[..., Any], compile_graph(module, inputs))

    def synchronise(self, slate: Slate) -> None:
        """Nothing is pending on a CPU."""

    def forget(self, slate: Slate) -> None:
        """Graphs take any slate of their shape."""


def _function(graph: Graph) -> Ready:
    """``compute`` for one graph, in a code object of its own: dynamo counts recompilations by code,
    and gives up at eight."""

    def run(model: nn.Module, slate: Slate) -> Tensor:
        return compute(graph, model, slate)

    code = run.__code__.replace(co_name=graph.name)
    return cast(Ready, FunctionType(code, run.__globals__, graph.name, None, run.__closure__))
