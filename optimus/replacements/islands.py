"""Attention by hand, or with weights that are dropped, inside models whose rest is on SDPA."""

from __future__ import annotations

from optimus.replacements._scores import scores

ARCHITECTURES = (
    scores("aria", "AriaCrossAttention"),
    scores("evolla", "EvollaSequenceCompressorAttention", "EvollaSequenceAlignerCrossAttention"),
    scores("phi4_multimodal", "Phi4MultimodalVisionMultiheadAttentionPoolingHead"),
    scores("siglip", "SiglipMultiheadAttentionPoolingHead"),
    scores("siglip2", "Siglip2MultiheadAttentionPoolingHead"),
)
