"""RoBERTa: BERT with positions that count from the padding id."""

from __future__ import annotations

from typing import Any

from optimus.core.replacement import Architecture
from optimus.replacements._families import ENCODER, fused, unpadded


def tiny() -> Any:
    """Two layers, wide enough to pack."""
    from transformers import RobertaConfig

    return RobertaConfig(**ENCODER, pad_token_id=1)


ARCHITECTURE = Architecture(
    model_type="roberta",
    tiny=tiny,
    heads=("AutoModel", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"),
    replacements=(unpadded("roberta", "RobertaModel"), fused("roberta", "RobertaModel")),
)
