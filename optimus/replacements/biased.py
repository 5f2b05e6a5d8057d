"""Attention by hand with something added to its scores: ALiBi, positions, window tables."""

from __future__ import annotations

from optimus.replacements._scores import FusedDecomposed, FusedWithoutGradients, scores

ARCHITECTURES = (
    scores("bloom", "BloomAttention"),
    scores("mpt", "MptBlock"),
    scores("mpnet", "MPNetSelfAttention"),
    scores("cpmant", "CpmAntAttention"),
    scores("deberta", "DisentangledSelfAttention"),
    scores("deberta-v2", "DisentangledSelfAttention"),
    scores("sew-d", "DisentangledSelfAttention", mixin=FusedWithoutGradients),
    scores("xlnet", "XLNetRelativeAttention"),
    scores("funnel", "FunnelRelMultiheadAttention"),
    scores("fastspeech2_conformer", "FastSpeech2ConformerAttention"),
    scores("speecht5", "SpeechT5Attention"),
    scores("wavlm", "WavLMAttention"),
    scores("layoutlmv2", "LayoutLMv2SelfAttention"),
    scores("layoutlmv3", "LayoutLMv3SelfAttention"),
    scores("pp_doclayout_v2", "PPDocLayoutV2ReadingOrderSelfAttention"),
    scores("bros", "BrosSelfAttention"),
    scores("levit", "LevitAttention", "LevitAttentionSubsample"),
    scores("donut-swin", "transformers.models.donut.modeling_donut_swin:DonutSwinSelfAttention"),
    scores(
        "maskformer-swin",
        "transformers.models.maskformer.modeling_maskformer_swin:MaskFormerSwinSelfAttention",
    ),
    scores("clap", "ClapAudioSelfAttention"),
    scores("swinv2", "Swinv2SelfAttention"),
    scores("swin2sr", "Swin2SRSelfAttention"),
    scores("vitdet", "VitDetAttention"),
    scores("seggpt", "SegGptAttention", mixin=FusedDecomposed),
    scores("got_ocr2", "GotOcr2VisionAttention"),
    scores("slanext", "SLANeXtVisionAttention"),
    scores("pp_formulanet", "PPFormulaNetVisionAttention"),
    scores(
        "esm",
        "transformers.models.esm.modeling_esmfold:EsmFoldSelfAttention",
        "transformers.models.esm.modeling_esmfold:EsmFoldAttention",
    ),
    scores("longt5", "LongT5LocalAttention", "LongT5TransientGlobalAttention"),
)
