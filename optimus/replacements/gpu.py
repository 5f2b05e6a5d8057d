"""Fewer bits on CUDA: linear layers of any ``nn.Module``."""

from __future__ import annotations

from collections.abc import Iterator

from optimus.core.backend import Mode
from optimus.core.replacement import Architecture, Fidelity, Replacement
from optimus.ops.weights import Fp8Weight, Int4Weight, Int4WeightG64, Int4WeightG128, Int8Weight
from optimus.replacements._gpu_linear import rounding_to

LINEAR = ("torch.nn.modules.linear:Linear", "transformers.pytorch_utils:Conv1D")
INT8 = ("int8-weights", "products of 8-bit weights")
INT4 = ("int4-tiles", "products of 4-bit tiles (from compute capability 8.0)")
FP8 = ("fp8-rows", "products of fp8 rows (from compute capability 8.9)")
# The last word of a name, the first of its mixin, the layout, and what it needs.
LAYOUTS = (
    ("int8", "Int8", Int8Weight, INT8),
    ("int4", "Int4", Int4Weight, INT4),
    ("int4-g64", "Int4G64", Int4WeightG64, INT4),
    ("int4-g128", "Int4G128", Int4WeightG128, INT4),
    ("fp8", "Fp8", Fp8Weight, FP8),
)


def rows() -> Iterator[Replacement]:
    """Every layout; the names end as those of the CPU's do, so that one recipe serves both."""
    for name, word, layout, (feature, needs) in LAYOUTS:
        yield Replacement(
            name=f"any.gpu-linear.{name}",
            targets=LINEAR,
            mixin=rounding_to(layout, f"Gpu{word}", feature, needs),
            fidelity=Fidelity.LOSSY,
            modes=frozenset({Mode.INFERENCE}),
            backends=frozenset({"cuda"}),
        )


ARCHITECTURE = Architecture(model_type="any", replacements=tuple(rows()))
