"""Attention inside models on SDPA that is by hand, drops its weights, or misses the kernel."""

from __future__ import annotations

from optimus.replacements._scores import scores

ARCHITECTURES = (
    scores("aria", "AriaCrossAttention"),
    scores("bridgetower", "BridgeTowerCrossAttention"),
    scores("conditional_detr", "ConditionalDetrDecoderCrossAttention"),
    scores("evolla", "EvollaSequenceCompressorAttention", "EvollaSequenceAlignerCrossAttention"),
    scores("falcon", "FalconAttention"),
    scores("inkling", "InklingAttention"),
    scores("phi4_multimodal", "Phi4MultimodalVisionMultiheadAttentionPoolingHead"),
    scores("siglip", "SiglipMultiheadAttentionPoolingHead"),
    scores("siglip2", "Siglip2MultiheadAttentionPoolingHead"),
    scores("videoprism", "VideoPrismMultiheadAttentionPoolingHead"),
)
