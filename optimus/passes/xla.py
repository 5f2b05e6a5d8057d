"""What XLA wants of the whole model: shapes that stay, and layers split over several devices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from optimus.core.backend import Context, Mode, detect
from optimus.core.errors import Refusal
from optimus.core.originals import Keeper
from optimus.core.paths import generates
from optimus.core.replacement import Fidelity
from optimus.core.surgery import Surgeon
from optimus.generation.lazy import Lazy
from optimus.ops.spmd import SPLIT, Split, devices, sharding, unfit_devices
from optimus.passes._static import Static

XLA = frozenset({"xla"})
# Which dimension of a weight ``[out, in]`` each style of transformers' tp_plan splits.
DIMENSIONS = {
    "colwise": 0,
    "colwise_gather_output": 0,
    "packed_colwise": 0,
    "rowwise": 1,
    "rowwise_split_input": 1,
}


@dataclass(frozen=True, slots=True)
class Sharding:
    """Annotations for XLA's partitioner, by transformers' own tensor-parallel plan.

    Only where the process is in SPMD mode, and nobody has annotated the model yet. The model's
    forward, its keys and its shapes stay; the compiler adds what has to be exchanged.
    """

    name: str = "xla.sharding"
    fidelity: Fidelity = Fidelity.CLOSE
    backends: frozenset[str] = XLA
    by_name: bool = False

    def concerns(self, model: nn.Module) -> bool:
        """Models that are on XLA."""
        return detect(model).name in self.backends

    def refuses(self, model: nn.Module, context: Context) -> Refusal | None:
        """Where there is nothing to split over, nothing to split, or somebody has split already."""
        if context.backend.name not in self.backends:
            return Refusal(f"not for {context.backend.name}", hardware=True)
        if context.mode is Mode.TRAINING:
            return Refusal("not for training: gradients were never tried")
        if refusal := unfit_devices():
            return refusal
        named = (name for name, one in model.named_parameters() if sharding(one))
        if (name := next(named, None)) is not None:
            return Refusal(f"{name} is sharded already")
        if not any(True for _ in _splits(model)):
            return Refusal(f"no tp_plan of transformers splits its layers over {devices()} devices")
        return None

    def settles(self, context: Context) -> Context:
        """Nothing changes for the others."""
        return context

    def run(self, model: nn.Module, surgeon: Surgeon, keeper: Keeper) -> None:
        """Annotate the layers that the plan names; all else is whole on every device."""
        for module, split in list(_splits(model)):
            surgeon.set_attribute(module, SPLIT, split)
            surgeon.fold(module, split)


def _splits(model: nn.Module) -> Iterator[tuple[nn.Module, Split]]:
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    for path, module in model.named_modules():
        dimension = DIMENSIONS.get(plan.get(re.sub(r"\d+", "*", path), ""))
        if dimension is None or not isinstance(module, nn.Linear):
            continue
        owner = model.get_submodule(path.rpartition(".")[0])
        # Half a head on a device would have to be put together before anything is done with it.
        unit = getattr(owner, "head_dim", 1)
        if module.weight.shape[dimension] % (unit * devices()) == 0:
            yield module, Split(dimension)


@dataclass(frozen=True, slots=True)
class LazyStatic(Static):
    """Generation in static shapes, of which plans for other hardware say nothing."""

    def concerns(self, model: nn.Module) -> bool:
        """Models that generate, on XLA."""
        return generates(model) and detect(model).name in self.backends


PASSES = (Sharding(), LazyStatic("static.xla", XLA, Lazy, by_name=False))
