"""Generation: caches with room, and static shapes, for a model that generates on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from optimus.core.backend import CPUS, Context, Mode
from optimus.core.errors import Refusal
from optimus.core.originals import Keeper
from optimus.core.paths import generates
from optimus.core.replacement import Fidelity, reclassed
from optimus.core.surgery import Surgeon
from optimus.generation.roomy import RoomyGeneration
from optimus.generation.runner import Compiled
from optimus.passes._static import Static

NEEDED = "_prepare_cache_for_generation"


@dataclass(frozen=True, slots=True)
class Roomy:
    """The model's own class, with ``generate`` on a cache that is written and not copied."""

    name: str = "cpu.cache"
    fidelity: Fidelity = Fidelity.EXACT
    backends: frozenset[str] = CPUS
    by_name: bool = False

    def concerns(self, model: nn.Module) -> bool:
        """Models that generate."""
        return generates(model)

    def refuses(self, model: nn.Module, context: Context) -> Refusal | None:
        """Where nothing generates, or in another way."""
        if context.backend.name not in self.backends:
            return Refusal(f"not for {context.backend.name}", hardware=True)
        if context.mode is not Mode.INFERENCE:
            return Refusal(f"not for {context.mode.value}")
        if not generates(model) or not hasattr(model, NEEDED):
            return Refusal("it does not generate by transformers' generate")
        supports = getattr(model, "_supports_default_dynamic_cache", None)
        if supports is None or not supports():
            return Refusal("it has a cache of its own kind")
        return None

    def settles(self, context: Context) -> Context:
        """Nothing changes for the others."""
        return context

    def run(self, model: nn.Module, surgeon: Surgeon, keeper: Keeper) -> None:
        """Swap the class of the root."""
        RoomyGeneration.setup(model, surgeon)
        surgeon.reclass(model, reclassed(RoomyGeneration, type(model)))


def lacks_compiler(model: nn.Module, context: Context) -> Refusal | None:
    """Why inductor could not compile here, or None."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return Refusal(
            "torch.compile finds no C++ compiler on this machine. Install g++, or name one in CXX",
            hardware=True,
        )
    return None


PASSES = (
    Roomy(),
    Static("static.inductor", CPUS, Compiled, lacks_compiler),
)
