"""GPT-2: linear layers that store their weight ``[in, out]``."""

from __future__ import annotations

from typing import Any

from optimus.core.backend import CPUS, Mode
from optimus.core.replacement import Architecture, Replacement
from optimus.replacements._families import fused
from optimus.replacements._linear import PackedByColumn


def tiny() -> Any:
    """Two layers, wide enough to pack."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=99,
        n_embd=256,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


ARCHITECTURE = Architecture(
    model_type="gpt2",
    tiny=tiny,
    heads=("AutoModelForCausalLM", "AutoModelForSequenceClassification"),
    replacements=(
        fused("gpt2", "GPT2Model"),
        Replacement(
            name="gpt2.conv1d.packed",
            targets=("transformers.pytorch_utils:Conv1D",),
            mixin=PackedByColumn,
            modes=frozenset({Mode.INFERENCE}),
            backends=CPUS,
        ),
    ),
)
