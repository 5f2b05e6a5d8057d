"""Qwen3: Llama with norms on queries and keys."""

from __future__ import annotations

from typing import Any

from optimus.core.replacement import Architecture
from optimus.replacements._families import DECODER, fused


def tiny() -> Any:
    """Two layers, wide enough to pack."""
    from transformers import Qwen3Config

    return Qwen3Config(**DECODER, head_dim=64)


ARCHITECTURE = Architecture(
    model_type="qwen3",
    tiny=tiny,
    heads=("AutoModelForCausalLM", "AutoModelForSequenceClassification"),
    replacements=(fused("qwen3", "Qwen3Model"),),
)
