"""BERT, and what is a BERT under another name: MiniLM, BGE, E5, GTE."""

from __future__ import annotations

from typing import Any

from optimus.core.replacement import Architecture
from optimus.replacements._families import ENCODER, fused, unpadded, unpadded_graph


def tiny() -> Any:
    """Two layers, wide enough to pack."""
    from transformers import BertConfig

    return BertConfig(**ENCODER)


ARCHITECTURE = Architecture(
    model_type="bert",
    tiny=tiny,
    heads=("AutoModel", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"),
    replacements=(
        unpadded("bert", "BertModel"),
        unpadded_graph("bert", "BertModel"),
        fused("bert", "BertModel"),
    ),
)
