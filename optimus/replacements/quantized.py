"""Fewer bits: linear layers of any ``nn.Module``, and the experts of transformers' MoE models."""

from __future__ import annotations

from collections.abc import Iterator

from optimus.core.backend import CPUS, Mode
from optimus.core.replacement import Architecture, Fidelity, Mixin, Replacement
from optimus.ops.quantized import INT4, INT8, INT8_DYNAMIC, Scheme
from optimus.replacements._experts import experts_rounding_to
from optimus.replacements._quantized import rounding_to

# The last word of a name, the first of its mixin, and how it rounds.
SCHEMES = (
    ("int8", "Int8", INT8),
    ("int8-dynamic", "Int8Dynamic", INT8_DYNAMIC),
    ("int4", "Int4", INT4),
    ("int4-g64", "Int4G64", Scheme(4, 64)),
    ("int4-g128", "Int4G128", Scheme(4, 128)),
    ("int4-asymmetric", "Int4Asymmetric", Scheme(4, 32, symmetric=False)),
)
LINEAR = ("torch.nn.modules.linear:Linear", "transformers.pytorch_utils:Conv1D")

# Every class under transformers' ``use_experts_implementation`` that has a gate.
GATED = (
    ("afmoe", "AfmoeExperts"),
    ("aria", "AriaExperts"),
    ("axk1", "AXK1Experts"),
    ("axk2", "AXK2Experts"),
    ("bailing_hybrid", "BailingHybridExperts"),
    ("beam", "BeamExperts"),
    ("cohere2_moe", "Cohere2MoeExperts"),
    ("deepseek_ocr2", "DeepseekOcr2TextExperts"),
    ("deepseek_v2", "DeepseekV2Experts"),
    ("deepseek_v3", "DeepseekV3Experts"),
    ("deepseek_v32", "DeepseekV32Experts"),
    ("deepseek_v4", "DeepseekV4Experts"),
    ("diffusion_gemma", "DiffusionGemmaTextExperts"),
    ("dots1", "Dots1Experts"),
    ("dots3_note", "Dots3NoteExperts"),
    ("ernie4_5_moe", "Ernie4_5_MoeExperts"),
    ("ernie4_5_vl_moe", "Ernie4_5_VLMoeMoeExperts"),
    ("exaone_moe", "ExaoneMoeExperts"),
    ("flex_olmo", "FlexOlmoExperts"),
    ("flint", "FlintExperts"),
    ("gemma4", "Gemma4TextExperts"),
    ("glm4_moe", "Glm4MoeExperts"),
    ("glm4_moe_lite", "Glm4MoeLiteExperts"),
    ("glm4v_moe", "Glm4vMoeTextExperts"),
    ("glm5_next", "Glm5NextTextExperts"),
    ("glm_moe_dsa", "GlmMoeDsaExperts"),
    ("gpt_oss", "GptOssExperts"),
    ("granitemoe", "GraniteMoeExperts"),
    ("granitemoe_swa", "GraniteMoeSWAExperts"),
    ("granitemoehybrid", "GraniteMoeHybridExperts"),
    ("granitemoeshared", "GraniteMoeSharedExperts"),
    ("hunyuan_v1_moe", "HunYuanMoEV1Experts"),
    ("hy_v3", "HYV3Experts"),
    ("hy_v4", "HYV4Experts"),
    ("inkling", "InklingExperts"),
    ("inkling2", "Inkling2Experts"),
    ("jamba", "JambaExperts"),
    ("kimi_linear", "KimiLinearExperts"),
    ("kolibri1", "Kolibri1Experts"),
    ("laguna", "LagunaExperts"),
    ("lfm2_moe", "Lfm2MoeExperts"),
    ("mellum", "MellumExperts"),
    ("mimo_v2_flash", "MiMoV2FlashExperts"),
    ("minimax", "MiniMaxExperts"),
    ("minimax_m2", "MiniMaxM2Experts"),
    ("minimax_m3_vl", "MiniMaxM3VLExperts"),
    ("mistral4", "Mistral4Experts"),
    ("mistral_large4", "MistralLarge4TextExperts"),
    ("mixtral", "MixtralExperts"),
    ("muse_spark", "MuseSparkExperts"),
    ("olmoe", "OlmoeExperts"),
    ("openai_privacy_filter", "OpenAIPrivacyFilterExperts"),
    ("phimoe", "PhimoeExperts"),
    ("qwen2_moe", "Qwen2MoeExperts"),
    ("qwen3_5_moe", "Qwen3_5MoeExperts"),
    ("qwen3_moe", "Qwen3MoeExperts"),
    ("qwen3_next", "Qwen3NextExperts"),
    ("qwen3_omni_moe", "Qwen3OmniMoeTalkerTextExperts"),
    ("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextExperts"),
    ("qwen3_vl_moe", "Qwen3VLMoeTextExperts"),
    ("qwen4_exp", "Qwen4ExpTextExperts"),
    ("solar_open", "SolarOpenExperts"),
    ("unlimited_ocr", "UnlimitedOcrTextExperts"),
    ("zaya", "ZayaExperts"),
)
UNGATED = (("nemotron_h", "NemotronHExperts"),)


def row(kind: str, name: str, targets: tuple[str, ...], mixin: type[Mixin]) -> Replacement:
    """A lossy replacement of ``any`` model for CPUs."""
    return Replacement(
        name=f"any.{kind}.{name}",
        targets=targets,
        mixin=mixin,
        fidelity=Fidelity.LOSSY,
        modes=frozenset({Mode.INFERENCE}),
        backends=CPUS,
    )


def classes(families: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Targets in the modeling file of each family."""
    return tuple(f"transformers.models.{f}.modeling_{f}:{name}" for f, name in families)


def rows() -> Iterator[Replacement]:
    """Every kind of module in every scheme."""
    for name, word, scheme in SCHEMES:
        yield row("linear", name, LINEAR, rounding_to(scheme, word))
        gated = experts_rounding_to(scheme, word, ("gate_up_proj", "down_proj"))
        yield row("experts", name, classes(GATED), gated)
        plain = experts_rounding_to(scheme, word, ("up_proj", "down_proj"))
        yield row("ungated-experts", name, classes(UNGATED), plain)


ARCHITECTURE = Architecture(model_type="any", replacements=tuple(rows()))
