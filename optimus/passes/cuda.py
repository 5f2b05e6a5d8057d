"""What CUDA wants of the whole model, asked for by name: compiling it, and CUDA graphs.

None of it has run on a GPU here. What it does to a model is tested on a CPU, with another compiler
and with a double of the captures.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from optimus.core.backend import Context, Mode
from optimus.core.errors import Refusal
from optimus.core.originals import Keeper
from optimus.core.paths import is_sharded
from optimus.core.replacement import Fidelity, reclassed
from optimus.core.surgery import Surgeon
from optimus.generation.cuda_graphs import TUNED, Graphs, compiled, plain
from optimus.passes._replay import GRAPHS, Replayed, Replays
from optimus.passes._static import Static

CUDA = frozenset({"cuda"})
COMPILED = "_compiled_call_impl"
# The mode "reduce-overhead", and no graph for each of the shapes that change with every call: a
# kernel in a graph costs 64 KB of device memory a shape.
REDUCED = {**TUNED, "triton.cudagraphs": True, "triton.cudagraph_skip_dynamic_graphs": True}


@dataclass(frozen=True, slots=True)
class Compiled:
    """The change of one module: its own calls are compiled, at the first of them.

    By ``nn.Module.compile``, so that no key and no class changes. A copy is not compiled, which is
    torch's own way.
    """

    path: str
    compiler: str
    options: tuple[tuple[str, Any], ...]

    def fold(self, model: nn.Module) -> None:
        """Compile it; nothing is traced yet."""
        kept = {"options": dict(self.options)} if self.compiler == "inductor" else {}
        model.get_submodule(self.path).compile(backend=self.compiler, **kept)

    def unfold(self, model: nn.Module) -> None:
        """Call it as it is."""
        vars(model.get_submodule(self.path)).pop(COMPILED, None)


@dataclass(frozen=True, slots=True)
class Compile:
    """``torch.compile``, for the whole model or for each of its blocks.

    Blocks compile in the time of one, since they are alike; the whole leaves nothing between them.
    ``graphs``: launched as CUDA graphs, for inference; training takes the passes without.
    """

    name: str
    blocks: bool
    graphs: bool
    compiler: str = "inductor"
    fidelity: Fidelity = Fidelity.CLOSE
    backends: frozenset[str] = CUDA
    by_name: bool = True

    def concerns(self, model: nn.Module) -> bool:
        """Every model."""
        return True

    def refuses(self, model: nn.Module, context: Context) -> Refusal | None:
        """Without a compiler, what is compiled already, and graphs in training."""
        if context.backend.name not in self.backends:
            return Refusal(f"{self.name} is not built for {context.backend.name}", hardware=True)
        if self.compiler == "inductor" and (refusal := without_compiler(model, context)):
            return refusal
        if self.graphs and context.mode is Mode.TRAINING:
            return Refusal("a captured graph has no backward pass; use cuda.compile to train")
        if any(vars(one).get(COMPILED) is not None for one in model.modules()):
            return Refusal("a module of the model is compiled already")
        if self.blocks and not blocks_of(model):
            return Refusal("the model has no blocks; use cuda.compile-whole")
        if not self.blocks and any(is_sharded(one) for one in model.modules()):
            return Refusal("the model is sharded, and gathers its weights between blocks")
        return None

    def settles(self, context: Context) -> Context:
        """Nothing changes for the others."""
        return context

    def run(self, model: nn.Module, surgeon: Surgeon, keeper: Keeper) -> None:
        """Before anything is swapped: what is compiled is what is there at the first call."""
        options = tuple((REDUCED if self.graphs else TUNED).items())
        for path in blocks_of(model) if self.blocks else ("",):
            surgeon.fold(model, Compiled(path, self.compiler, options))


def without_compiler(model: nn.Module, context: Context) -> Refusal | None:
    """Where nothing can be compiled."""
    if importlib.util.find_spec("triton") is not None:
        return None
    return Refusal("torch compiles for CUDA by triton, which is not installed")


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """Paths of the modules that stand in rows of their kind: layers, in models of every family."""
    found: list[str] = []
    for path, module in model.named_modules():
        kinds = {type(child) for child in module.children()}
        inside = any(path.startswith(f"{one}.") for one in found)
        many = len(kinds) == 1 and len(module._modules) > 1 and kinds != {nn.ModuleList}
        if isinstance(module, nn.ModuleList) and many and not inside:
            found += [f"{path}.{number}".lstrip(".") for number in range(len(module))]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Capture:
    """The whole model as it is, each shape captured as a CUDA graph, in bounded memory."""

    name: str = "cuda.graphs"
    fidelity: Fidelity = Fidelity.CLOSE
    backends: frozenset[str] = CUDA
    by_name: bool = True
    make: Callable[[], Graphs] = Graphs

    def concerns(self, model: nn.Module) -> bool:
        """Every model."""
        return True

    def refuses(self, model: nn.Module, context: Context) -> Refusal | None:
        """In training, and where weights are not where they will be."""
        if context.backend.name not in self.backends:
            return Refusal(f"{self.name} is not built for {context.backend.name}", hardware=True)
        if context.mode is Mode.TRAINING:
            return Refusal("a captured graph has no backward pass")
        if any(is_sharded(one) for one in model.modules()):
            return Refusal("the model is sharded, and gathers its weights anew for every call")
        if any("_hf_hook" in vars(one) for one in model.modules()):
            return Refusal("accelerate moves its weights or inputs for every call")
        return None

    def settles(self, context: Context) -> Context:
        """Nothing changes for the others."""
        return context

    def run(self, model: nn.Module, surgeon: Surgeon, keeper: Keeper) -> None:
        """Swap the class of the root."""
        surgeon.set_attribute(model, GRAPHS, Replays(self.make()))
        surgeon.reclass(model, reclassed(Replayed, type(model)))


PASSES = (
    Static("static.cuda", CUDA, compiled, without_compiler),
    Static("static.cuda-graphs", CUDA, plain),
    Compile("cuda.compile", blocks=True, graphs=False),
    Compile("cuda.compile-blocks", blocks=True, graphs=True),
    Compile("cuda.compile-whole", blocks=False, graphs=True),
    Capture(),
)
