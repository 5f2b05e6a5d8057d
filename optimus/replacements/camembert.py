"""CamemBERT: RoBERTa in French."""

from __future__ import annotations

from typing import Any

from optimus.core.replacement import Architecture
from optimus.replacements._families import ENCODER, fused, unpadded


def tiny() -> Any:
    """Two layers, wide enough to pack."""
    from transformers import CamembertConfig

    return CamembertConfig(**ENCODER, pad_token_id=1)


ARCHITECTURE = Architecture(
    model_type="camembert",
    tiny=tiny,
    heads=("AutoModel", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"),
    replacements=(unpadded("camembert", "CamembertModel"), fused("camembert", "CamembertModel")),
)
