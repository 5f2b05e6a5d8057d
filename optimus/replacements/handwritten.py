"""Softmax attention that its model writes out by hand; a line an architecture.

A line names the innermost class whose forward is told whether anybody wants the weights: mostly
the attention itself, a layer or an encoder where the attention always returns them.
"""

from __future__ import annotations

from optimus.replacements._scores import FusedByColumns, scores

ARCHITECTURES = (
    scores("gpt_neo", "GPTNeoSelfAttention"),
    scores("gptj", "GPTJAttention"),
    scores("codegen", "CodeGenAttention"),
    scores("gpt_neox_japanese", "GPTNeoXJapaneseAttention"),
    scores("openai-gpt", "transformers.models.openai.modeling_openai:Attention"),
    scores("imagegpt", "ImageGPTAttention"),
    scores("xglm", "XGLMAttention"),
    scores("bark", "BarkSelfAttention"),
    scores("clvp", "ClvpSelfAttention"),
    scores("xlm", "MultiHeadAttention"),
    scores("flaubert", "MultiHeadAttention"),
    scores("fsmt", "Attention"),
    scores("mvp", "MvpAttention"),
    scores("trocr", "TrOCRAttention"),
    scores("led", "LEDDecoderAttention"),
    scores("prophetnet", "ProphetNetEncoderLayer", "ProphetNetDecoderLayer"),
    scores("rembert", "RemBertSelfAttention"),
    scores("roformer", "RoFormerSelfAttention"),
    scores("tapas", "TapasSelfAttention"),
    scores("megatron-bert", "MegatronBertSelfAttention"),
    scores("visual_bert", "VisualBertSelfAttention"),
    scores("vilt", "ViltSelfAttention"),
    scores("flava", "FlavaSelfAttention"),
    scores("lxmert", "LxmertAttention"),
    scores("tvp", "TvpAttention"),
    scores("squeezebert", "SqueezeBertSelfAttention", mixin=FusedByColumns),
    scores("canine", "CanineSelfAttention"),
    scores("convbert", "ConvBertSelfAttention"),
    scores("big_bird", "BigBirdSelfAttention"),
    scores("bigbird_pegasus", "BigBirdPegasusSelfAttention"),
    scores("ibert", "IBertSelfAttention"),
    scores("luke", "LukeSelfAttention"),
    scores("lilt", "LiltSelfAttention"),
    scores(
        "blip", "BlipAttention", "transformers.models.blip.modeling_blip_text:BlipTextSelfAttention"
    ),
    scores("git", "GitSelfAttention"),
    scores("perceiver", "PerceiverSelfAttention"),
    scores("cvt", "CvtSelfAttention"),
    scores("hiera", "HieraMaskUnitAttention"),
    scores("glpn", "GLPNEfficientSelfAttention"),
    scores("pvt", "PvtEfficientSelfAttention"),
    scores("pvt_v2", "PvtV2SelfAttention"),
    scores("mobilevit", "MobileViTSelfAttention"),
    scores("mgp-str", "MgpstrEncoder"),
    scores("timesformer", "TimesformerSelfAttention"),
    scores("groupvit", "GroupViTAttention"),
    scores("dab-detr", "DetrAttention", "DabDetrDecoderLayer"),
    scores("table-transformer", "TableTransformerAttention"),
    scores("mask2former", "Mask2FormerMaskedAttentionDecoderLayer"),
    scores(
        "oneformer",
        "OneFormerTextMapperAttention",
        "OneFormerTransformerDecoderLayer",
        "OneFormerTransformerDecoderQueryTransformerDecoderLayer",
    ),
    scores("omdet-turbo", "OmDetTurboMultiheadAttention"),
    scores("zoedepth", "ZoeDepthMultiheadAttention"),
    scores("superglue", "SuperGlueSelfAttention"),
    scores("grounding-dino", "GroundingDinoEncoder", "GroundingDinoDecoder"),
    scores("mm-grounding-dino", "MMGroundingDinoEncoder", "MMGroundingDinoDecoder"),
)
