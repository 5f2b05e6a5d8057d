"""Qwen2: Llama with biases on the projections."""

from __future__ import annotations

from typing import Any

from optimus.core.replacement import Architecture
from optimus.replacements._families import fused


def tiny() -> Any:
    """Two layers, wide enough to pack."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=99,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )


ARCHITECTURE = Architecture(
    model_type="qwen2",
    tiny=tiny,
    heads=("AutoModelForCausalLM", "AutoModelForSequenceClassification"),
    replacements=(fused("qwen2", "Qwen2Model"),),
)
