"""XLM-RoBERTa: RoBERTa in a hundred languages."""

from __future__ import annotations

from typing import Any

from optimus.core.replacement import Architecture
from optimus.replacements._families import ENCODER, fused, unpadded


def tiny() -> Any:
    """Two layers, wide enough to pack."""
    from transformers import XLMRobertaConfig

    return XLMRobertaConfig(**ENCODER, pad_token_id=1)


ARCHITECTURE = Architecture(
    model_type="xlm-roberta",
    tiny=tiny,
    heads=("AutoModel", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"),
    replacements=(
        unpadded("xlm_roberta", "XLMRobertaModel"),
        fused("xlm_roberta", "XLMRobertaModel"),
    ),
)
