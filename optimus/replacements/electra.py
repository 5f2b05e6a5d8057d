"""ELECTRA: BERT with embeddings of a width of their own."""

from __future__ import annotations

from typing import Any

from optimus.core.replacement import Architecture
from optimus.replacements._families import ENCODER, fused, unpadded


def tiny() -> Any:
    """Two layers, wide enough to pack."""
    from transformers import ElectraConfig

    return ElectraConfig(**ENCODER, embedding_size=128)


ARCHITECTURE = Architecture(
    model_type="electra",
    tiny=tiny,
    heads=("AutoModel", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"),
    replacements=(unpadded("electra", "ElectraModel"), fused("electra", "ElectraModel")),
)
