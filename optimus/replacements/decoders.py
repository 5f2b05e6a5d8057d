"""Decoders on SDPA: keys that several heads share, and keys wider than values. One line each.

A model is a class whose config its attention layers read. Where that config turns out to have
neither, the plan says so.
"""

from __future__ import annotations

from optimus.core.backend import Mode
from optimus.core.replacement import Architecture, Replacement
from optimus.replacements._grouped import GroupedAttention

MEASURED = frozenset({"x86"})


def decoder(
    family: str, model: str, *, model_type: str | None = None, folder: str | None = None
) -> Architecture:
    """The row of ``model`` of the modeling file of ``family``, which may have another folder."""
    row = Replacement(
        name=f"{family}.attention.grouped",
        targets=(f"transformers.models.{folder or family}.modeling_{family}:{model}",),
        mixin=GroupedAttention,
        modes=frozenset({Mode.INFERENCE, Mode.COMPILE}),
        backends=MEASURED,
    )
    return Architecture(model_type=model_type or family, replacements=(row,))


# Latent attention: keys carry a rotary part that values have not.
LATENT = (
    decoder("axk1", "AXK1Model"),
    decoder("axk2", "AXK2Model"),
    decoder("bailing_hybrid", "BailingHybridModel"),
    decoder("deepseek_v2", "DeepseekV2Model"),
    decoder("deepseek_v3", "DeepseekV3Model"),
    decoder("deepseek_v32", "DeepseekV32Model"),
    decoder("dots3_note", "Dots3NoteTextModel", model_type="dots3_note_text"),
    decoder("glm4_moe_lite", "Glm4MoeLiteModel"),
    decoder("glm_moe_dsa", "GlmMoeDsaModel"),
    decoder("kimi_linear", "KimiLinearModel"),
    decoder("longcat_flash", "LongcatFlashModel"),
    decoder("minicpm3", "MiniCPM3Model"),
    decoder("mistral4", "Mistral4Model"),
    decoder("mistral_large4", "MistralLarge4TextModel", model_type="mistral_large4_text"),
    decoder("youtu", "YoutuModel"),
)

GROUPED = (
    decoder("afmoe", "AfmoeModel"),
    decoder("apertus", "ApertusModel"),
    decoder("arcee", "ArceeModel"),
    decoder("aria", "AriaTextModel", model_type="aria_text"),
    decoder("bamba", "BambaModel"),
    decoder("beam", "BeamModel"),
    decoder("bitnet", "BitNetModel"),
    decoder("cohere", "CohereModel"),
    decoder("cohere2", "Cohere2Model"),
    decoder("cohere2_moe", "Cohere2MoeModel"),
    decoder("cosmos3_edge", "Cosmos3EdgeTextModel", model_type="cosmos3_edge_text"),
    decoder("cwm", "CwmModel"),
    decoder("doge", "DogeModel"),
    decoder("dots1", "Dots1Model"),
    decoder("emu3", "Emu3TextModel", model_type="emu3_text_model"),
    decoder("ernie4_5", "Ernie4_5Model"),
    decoder("ernie4_5_moe", "Ernie4_5_MoeModel"),
    decoder("exaone4", "Exaone4Model"),
    decoder("exaone_moe", "ExaoneMoeModel"),
    decoder("falcon_h1", "FalconH1Model"),
    decoder("flex_olmo", "FlexOlmoModel"),
    decoder("gemma", "GemmaModel"),
    decoder("gemma3", "Gemma3TextModel", model_type="gemma3_text"),
    decoder("gemma3n", "Gemma3nTextModel", model_type="gemma3n_text"),
    decoder("glm", "GlmModel"),
    decoder("glm4", "Glm4Model"),
    decoder("glm4_moe", "Glm4MoeModel"),
    decoder("glm4v", "Glm4vTextModel", model_type="glm4v_text"),
    decoder("glm4v_moe", "Glm4vMoeTextModel", model_type="glm4v_moe_text"),
    decoder("glm_image", "GlmImageTextModel", model_type="glm_image_text"),
    decoder("glm_ocr", "GlmOcrTextModel", model_type="glm_ocr_text"),
    decoder("gpt_bigcode", "GPTBigCodeModel"),
    decoder("granite", "GraniteModel"),
    decoder("granite_docling", "GraniteDoclingTextModel", model_type="granite_docling_text"),
    decoder("granitemoe", "GraniteMoeModel"),
    decoder("granitemoehybrid", "GraniteMoeHybridModel"),
    decoder("granitemoeshared", "GraniteMoeSharedModel"),
    decoder("helium", "HeliumModel"),
    decoder("higgs_audio_v2", "HiggsAudioV2Model"),
    decoder("hunyuan_v1_dense", "HunYuanDenseV1Model"),
    decoder("hunyuan_v1_moe", "HunYuanMoEV1Model"),
    decoder("hunyuan_vl", "HunYuanVLTextModel", model_type="hunyuan_vl_text"),
    decoder("hy_v3", "HYV3Model"),
    decoder("hyperclovax", "HyperCLOVAXModel"),
    decoder("inkling", "InklingTextModel", model_type="inkling_text"),
    decoder("jais2", "Jais2Model"),
    decoder("jamba", "JambaModel"),
    decoder("kolibri1", "Kolibri1Model"),
    decoder("laguna", "LagunaModel"),
    decoder("lfm2", "Lfm2Model"),
    decoder("lfm2_moe", "Lfm2MoeModel"),
    decoder("lfm3", "Lfm3Model"),
    decoder("llama", "LlamaModel"),
    decoder("llama4", "Llama4TextModel", model_type="llama4_text"),
    decoder("mellum", "MellumModel"),
    decoder("minimax", "MiniMaxModel"),
    decoder("minimax_m2", "MiniMaxM2Model"),
    decoder("ministral", "MinistralModel"),
    decoder("ministral3", "Ministral3Model"),
    decoder("mistral", "MistralModel"),
    decoder("mixtral", "MixtralModel"),
    decoder("mllama", "MllamaTextModel", model_type="mllama_text_model"),
    decoder("molmo2", "Molmo2TextModel", model_type="molmo2_text"),
    decoder("muse_glimmer", "MuseGlimmerTextModel", model_type="muse_glimmer_text"),
    decoder("muse_spark", "MuseSparkTextModel", model_type="muse_spark_text"),
    decoder("nanochat", "NanoChatModel"),
    decoder("nemotron", "NemotronModel"),
    decoder("nemotron_h", "NemotronHModel"),
    decoder("olmo", "OlmoModel"),
    decoder("olmo2", "Olmo2Model"),
    decoder("olmo3", "Olmo3Model"),
    decoder("olmo_hybrid", "OlmoHybridModel"),
    decoder("olmoe", "OlmoeModel"),
    decoder("paddleocr_vl", "PaddleOCRTextModel", model_type="paddleocr_vl_text"),
    decoder("phi", "PhiModel"),
    decoder("phi3", "Phi3Model"),
    decoder("phimoe", "PhimoeModel"),
    decoder("qwen2", "Qwen2Model"),
    decoder("qwen2_5_vl", "Qwen2_5_VLTextModel", model_type="qwen2_5_vl_text"),
    decoder("qwen2_moe", "Qwen2MoeModel"),
    decoder("qwen2_vl", "Qwen2VLTextModel", model_type="qwen2_vl_text"),
    decoder("qwen3", "Qwen3Model"),
    decoder("qwen3_5", "Qwen3_5TextModel", model_type="qwen3_5_text"),
    decoder("qwen3_5_moe", "Qwen3_5MoeTextModel", model_type="qwen3_5_moe_text"),
    decoder("qwen3_moe", "Qwen3MoeModel"),
    decoder("qwen3_next", "Qwen3NextModel"),
    decoder("qwen3_vl", "Qwen3VLTextModel", model_type="qwen3_vl_text"),
    decoder("qwen3_vl_moe", "Qwen3VLMoeTextModel", model_type="qwen3_vl_moe_text"),
    decoder("seed_oss", "SeedOssModel"),
    decoder("smollm3", "SmolLM3Model"),
    decoder("solar_open", "SolarOpenModel"),
    decoder("stablelm", "StableLmModel"),
    decoder("starcoder2", "Starcoder2Model"),
    decoder("step3p7", "Step3p7TextModel", model_type="step3p5"),
    decoder("unlimited_ocr", "UnlimitedOcrTextModel", model_type="unlimited_ocr_text"),
    decoder("zaya", "ZayaModel"),
)

ARCHITECTURES = (*LATENT, *GROUPED)
