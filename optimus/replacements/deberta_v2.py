"""DeBERTa v2 and v3: disentangled attention of its own; its linear layers are packed."""

from __future__ import annotations

from typing import Any

from optimus.core.replacement import Architecture


def tiny() -> Any:
    """Two layers, wide enough to pack."""
    from transformers import DebertaV2Config

    return DebertaV2Config(
        vocab_size=99,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )


ARCHITECTURE = Architecture(
    model_type="deberta-v2",
    tiny=tiny,
    heads=("AutoModel", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"),
    replacements=(),
)
