"""Mistral: Llama with a sliding window."""

from __future__ import annotations

from typing import Any

from optimus.core.replacement import Architecture
from optimus.replacements._families import DECODER, fused


def tiny() -> Any:
    """Two layers, wide enough to pack."""
    from transformers import MistralConfig

    return MistralConfig(**DECODER, sliding_window=8)


ARCHITECTURE = Architecture(
    model_type="mistral",
    tiny=tiny,
    heads=("AutoModelForCausalLM", "AutoModelForSequenceClassification"),
    replacements=(fused("mistral", "MistralModel"),),
)
