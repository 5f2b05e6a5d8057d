"""Llama 4: text and images, each rotated by complex numbers of its own."""

from __future__ import annotations

from optimus.replacements._families import MODELING
from optimus.replacements._rotary import rotary


def _own(*classes: str) -> tuple[str, ...]:
    return tuple(MODELING.format("llama4", name) for name in classes)


ARCHITECTURES = (
    rotary("llama4_text", *_own("Llama4TextRotaryEmbedding", "Llama4TextAttention")),
    rotary("llama4_vision_model", *_own("Llama4VisionRotaryEmbedding", "Llama4VisionAttention")),
)
