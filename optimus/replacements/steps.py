"""Decoder layers a token at a time, in families whose layers are llama's but for their names."""

from __future__ import annotations

from optimus.core.backend import Mode
from optimus.core.replacement import Architecture, Mixin, Replacement
from optimus.replacements._families import MODELING
from optimus.replacements._layer import Decoded
from optimus.replacements._steps import Gated, Normed, Stepped

# The prefix of the class names of each family.
FAMILIES = {
    "arcee": "Arcee",
    "granite": "Granite",
    "hyperclovax": "HyperCLOVAX",
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "solar_open": "SolarOpen",
}


def row(what: str, suffix: str, mixin: type[Mixin]) -> Replacement:
    """One part of the layers of every family."""
    return Replacement(
        name=f"any.step.{what}",
        targets=tuple(MODELING.format(family, p + suffix) for family, p in FAMILIES.items()),
        mixin=mixin,
        modes=frozenset({Mode.INFERENCE}),
        backends=frozenset({"x86"}),
    )


ARCHITECTURE = Architecture(
    model_type="any",
    replacements=(
        row("norm", "RMSNorm", Normed),
        row("mlp", "MLP", Gated),
        row("attention", "Attention", Stepped),
        row("layer", "DecoderLayer", Decoded),
    ),
)
