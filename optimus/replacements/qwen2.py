"""Qwen2: Llama with biases on the projections."""

from __future__ import annotations

from typing import Any

from optimus.core.replacement import Architecture
from optimus.replacements._families import DECODER, fused


def tiny() -> Any:
    """Two layers, wide enough to pack."""
    from transformers import Qwen2Config

    return Qwen2Config(**DECODER)


ARCHITECTURE = Architecture(
    model_type="qwen2",
    tiny=tiny,
    heads=("AutoModelForCausalLM", "AutoModelForSequenceClassification"),
    replacements=(fused("qwen2", "Qwen2Model"),),
)
