"""Fewer bits on XLA: linear layers of any ``nn.Module``.

The product is torch's plain operators, which XLA fuses: the codes are read and widened on the way
into the matrix unit. A weight is rounded on the host, where that is not one more graph to compile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from optimus.core.backend import Context, Mode
from optimus.core.errors import Refusal
from optimus.core.paths import Site
from optimus.core.replacement import Architecture, Fidelity, Replacement
from optimus.ops.spmd import SPLIT, shard
from optimus.ops.weights import Int8Weight, made_of, moved
from optimus.replacements._gpu_linear import OnTensorCores, TiledWeight
from optimus.replacements._quantized import upright


class LazyWeight(TiledWeight):
    """``weight`` as codes on a lazy device, split over the devices as the dense one was."""

    def round(self, module: nn.Module, weight: Tensor, worth: Tensor | None) -> Any:
        """One weight."""
        made = made_of(self.layout, upright(module, weight).cpu(), worth)
        made = moved(made, weight.device)
        split = vars(module).get(SPLIT)
        if split is not None:
            shard(made.codes, split.dimension)
            if split.dimension == 0:
                shard(made.scale, 0)
        return made


class XlaInt8(OnTensorCores):
    """``nn.Linear`` or ``Conv1D`` on a weight of 8 bits with one scale an output; inputs stay."""

    feature, needs = "int8-weights", "products of 8-bit weights"
    packing = LazyWeight(Int8Weight)
    bridges = (packing,)

    @classmethod
    def accepts(cls, site: Site, context: Context) -> Refusal | None:
        if context.dtype is torch.float16:
            return Refusal("in float16 a sum of products may overflow before it is scaled")
        return super().accepts(site, context)


ROW = Replacement(
    name="any.xla-linear.int8",
    targets=("torch.nn.modules.linear:Linear", "transformers.pytorch_utils:Conv1D"),
    mixin=XlaInt8,
    fidelity=Fidelity.LOSSY,
    modes=frozenset({Mode.INFERENCE}),
    backends=frozenset({"xla"}),
)

ARCHITECTURE = Architecture(model_type="any", replacements=(ROW,))
