"""XLM-RoBERTa: RoBERTa in a hundred languages."""

from __future__ import annotations

from typing import Any

from optimus.core.replacement import Architecture
from optimus.replacements._families import fused, unpadded


def tiny() -> Any:
    """Two layers, wide enough to pack."""
    from transformers import XLMRobertaConfig

    return XLMRobertaConfig(
        vocab_size=99,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=1,
    )


ARCHITECTURE = Architecture(
    model_type="xlm-roberta",
    tiny=tiny,
    heads=("AutoModel", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"),
    replacements=(
        unpadded("xlm_roberta", "XLMRobertaModel"),
        fused("xlm_roberta", "XLMRobertaModel"),
    ),
)
