"""DeBERTa v2 and v3: disentangled attention of its own; its linear layers are packed."""

from __future__ import annotations

from typing import Any

from optimus.core.replacement import Architecture
from optimus.replacements._families import ENCODER


def tiny() -> Any:
    """Two layers, wide enough to pack."""
    from transformers import DebertaV2Config

    return DebertaV2Config(**ENCODER)


ARCHITECTURE = Architecture(
    model_type="deberta-v2",
    tiny=tiny,
    heads=("AutoModel", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"),
    replacements=(),
)
