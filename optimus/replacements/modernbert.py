"""ModernBERT: rotary positions, and a window in most layers."""

from __future__ import annotations

from typing import Any

from optimus.core.replacement import Architecture
from optimus.replacements._encoder import Unpadded as UnpaddedEncoder
from optimus.replacements._families import ENCODER, fused, unpadded


class Unpadded(UnpaddedEncoder):
    """Both kinds of layer get no mask: ``varlen_attention`` draws the window per sequence."""

    def _no_mask(self) -> Any:
        return {"full_attention": None, "sliding_attention": None}


def tiny() -> Any:
    """A windowed layer and a global one, wide enough to pack; the window is shorter than a row."""
    from transformers import ModernBertConfig

    return ModernBertConfig(
        **ENCODER,
        local_attention=4,
        global_attn_every_n_layers=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )


ARCHITECTURE = Architecture(
    model_type="modernbert",
    tiny=tiny,
    heads=("AutoModel", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"),
    replacements=(
        unpadded("modernbert", "ModernBertModel", mixin=Unpadded),
        fused("modernbert", "ModernBertModel"),
    ),
)
