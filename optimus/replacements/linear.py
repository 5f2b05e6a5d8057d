"""Any ``nn.Linear`` in any ``nn.Module``: no config and no transformers needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from optimus.core.backend import CPUS, Mode
from optimus.core.replacement import Architecture, Replacement
from optimus.replacements._linear import Packed


def tiny() -> tuple[nn.Module, dict[str, Any]]:
    """A perceptron, and a batch for it."""
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.Linear(256, 3))
    return model, {"input": torch.ones(4, 256)}


ARCHITECTURE = Architecture(
    model_type="any",
    tiny=tiny,
    replacements=(
        Replacement(
            name="any.linear.packed",
            targets=("torch.nn.modules.linear:Linear",),
            mixin=Packed,
            modes=frozenset({Mode.INFERENCE}),
            backends=CPUS,
        ),
    ),
)
