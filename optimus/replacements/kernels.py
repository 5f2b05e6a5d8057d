"""Attention by a kernel that is asked for by name: ``optimus.transform(model, attention="math")``.

Of any model of transformers that is on SDPA, and only where it was asked for.
"""

from __future__ import annotations

from optimus.core.replacement import EVERYWHERE, Architecture, Replacement
from optimus.ops.chosen import KERNELS
from optimus.replacements._kernels import NAMES, choosing

# By the device of their operators.
BACKENDS = {"cpu": frozenset({"x86", "arm"}), "cuda": frozenset({"cuda"})}


def kernel(name: str) -> Replacement:
    """The row of the kernel of that name."""
    places = [BACKENDS[device] for device, one in KERNELS if one == name]
    return Replacement(
        name=f"any.kernel.{name}",
        targets=("transformers.modeling_utils:PreTrainedModel",),
        mixin=choosing(name),
        backends=frozenset[str]().union(*places) or EVERYWHERE,
        by_name=True,
    )


ARCHITECTURE = Architecture(model_type="any", replacements=tuple(kernel(name) for name in NAMES))
