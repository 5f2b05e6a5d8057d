"""Models whose attention already asks the host which function to use, and that run eager.

One line each, for the classes that own a config which attention layers read. Where a model can run
on SDPA by itself, its row is for who has loaded it with ``attn_implementation="eager"``.
"""

from __future__ import annotations

from typing import Any

from optimus.core.replacement import Architecture
from optimus.replacements._attention import FusedWithin
from optimus.replacements._families import fused


def hosted(
    family: str, *models: str, model_type: str | None = None, **options: Any
) -> Architecture:
    """The row of ``models`` of the modeling file of ``family``, by ``fused``."""
    row = fused(family, *models, **options)
    return Architecture(model_type=model_type or family, replacements=(row,))


# The host has no SDPA for these: a mask that it would misread, or a causality that it would guess.
GUARDED = (
    hosted("align", "AlignTextModel"),
    hosted("bigbird_pegasus", "BigBirdPegasusDecoder"),
    hosted("bridgetower", "BridgeTowerTextModel", mixin=FusedWithin),
    hosted("clap", "ClapTextModel"),
    hosted("git", "GitVisionModel"),
    hosted("informer", "InformerEncoder", "InformerDecoder"),
    hosted("longt5", "LongT5Stack"),
    hosted("markuplm", "MarkupLMModel"),
    hosted("nllb_moe", "NllbMoeEncoder", "NllbMoeDecoder", model_type="nllb-moe"),
    hosted("patchtsmixer", "PatchTSMixerEncoder"),
    hosted("pegasus_x", "PegasusXDecoder"),
    hosted("speech_to_text", "Speech2TextEncoder", "Speech2TextDecoder"),
    hosted("splinter", "SplinterModel"),
    hosted("switch_transformers", "SwitchTransformersStack"),
    hosted(
        "time_series_transformer", "TimeSeriesTransformerEncoder", "TimeSeriesTransformerDecoder"
    ),
)

# Sinks, which SDPA has no argument for.
SINKS = (
    hosted("deepseek_v4", "DeepseekV4Model"),
    hosted("flint", "FlintModel"),
    hosted("gpt_oss", "GptOssModel"),
    hosted("granite_swa", "GraniteSWAModel"),
    hosted("granitemoe_swa", "GraniteMoeSWAModel"),
    hosted("hy_v4", "HYV4Model"),
    hosted("inkling2", "Inkling2TextModel"),
    hosted("mimo_v2_flash", "MiMoV2FlashModel"),
    hosted("openai_privacy_filter", "OpenAIPrivacyFilterModel"),
)

# A soft cap, which SDPA has no argument for either: by tiles (ops/capped.py). A config may leave it
# out.
CAPPED = (
    hosted("gemma2", "Gemma2Model"),
    hosted("t5gemma", "T5GemmaEncoder", "T5GemmaDecoder"),
    hosted("vaultgemma", "VaultGemmaModel"),
    hosted("videoprism", "VideoPrismVisionModel", "VideoPrismTextModel"),
)

ON_REQUEST = (
    hosted("bart", "BartEncoder", "BartDecoder"),
    hosted("bert_generation", "BertGenerationEncoder", model_type="bert-generation"),
    hosted("blenderbot", "BlenderbotEncoder", "BlenderbotDecoder"),
    hosted("blip_2", "Blip2VisionModel", "Blip2QFormerModel", model_type="blip-2"),
    hosted("clip", "CLIPTextModel", "CLIPVisionModel"),
    hosted("data2vec_text", "Data2VecTextModel", model_type="data2vec-text", folder="data2vec"),
    hosted("deit", "DeiTModel"),
    hosted("ernie", "ErnieModel"),
    hosted("gpt_bigcode", "GPTBigCodeModel"),
    hosted("gpt_neox", "GPTNeoXModel"),
    hosted("hubert", "HubertModel"),
    hosted("layoutlm", "LayoutLMModel"),
    hosted("m2m_100", "M2M100Encoder", "M2M100Decoder"),
    hosted("marian", "MarianEncoder", "MarianDecoder"),
    hosted("mbart", "MBartEncoder", "MBartDecoder"),
    hosted("opt", "OPTDecoder"),
    hosted("pegasus", "PegasusEncoder", "PegasusDecoder"),
    hosted("roc_bert", "RoCBertModel"),
    hosted("t5", "T5Stack"),
    hosted("vit", "ViTModel"),
    hosted("vit_mae", "ViTMAEModel", "ViTMAEDecoder"),
    hosted("vit_msn", "ViTMSNModel"),
    hosted("wav2vec2", "Wav2Vec2Model"),
    hosted("whisper", "WhisperEncoder", "WhisperDecoder"),
    hosted("yolos", "YolosModel"),
)

ARCHITECTURES = (*GUARDED, *SINKS, *CAPPED, *ON_REQUEST)
