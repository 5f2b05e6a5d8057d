"""MPNet: relative position bias in an attention of its own; its linear layers are packed."""

from __future__ import annotations

from typing import Any

from optimus.core.replacement import Architecture
from optimus.replacements._families import ENCODER


def tiny() -> Any:
    """Two layers, wide enough to pack."""
    from transformers import MPNetConfig

    return MPNetConfig(**ENCODER)


ARCHITECTURE = Architecture(
    model_type="mpnet",
    tiny=tiny,
    heads=("AutoModel", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"),
    replacements=(),
)
