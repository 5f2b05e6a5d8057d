"""Llama: rotary decoder with grouped queries."""

from __future__ import annotations

from typing import Any

from optimus.core.replacement import Architecture
from optimus.replacements._families import DECODER, fused


def tiny() -> Any:
    """Two layers, wide enough to pack."""
    from transformers import LlamaConfig

    return LlamaConfig(**DECODER)


ARCHITECTURE = Architecture(
    model_type="llama",
    tiny=tiny,
    heads=("AutoModelForCausalLM", "AutoModelForSequenceClassification"),
    replacements=(fused("llama", "LlamaModel"),),
)
