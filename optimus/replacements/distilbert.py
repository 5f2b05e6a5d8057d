"""DistilBERT: BERT without token types and pooler."""

from __future__ import annotations

from typing import Any

from optimus.core.replacement import Architecture
from optimus.replacements._families import fused, unpadded


def tiny() -> Any:
    """Two layers, wide enough to pack."""
    from transformers import DistilBertConfig

    return DistilBertConfig(
        vocab_size=99, dim=256, hidden_dim=256, n_layers=2, n_heads=4, max_position_embeddings=64
    )


ARCHITECTURE = Architecture(
    model_type="distilbert",
    tiny=tiny,
    heads=("AutoModel", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"),
    replacements=(
        unpadded("distilbert", "DistilBertModel"),
        fused("distilbert", "DistilBertModel"),
    ),
)
