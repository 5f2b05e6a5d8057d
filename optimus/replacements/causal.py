"""Decoders whose prompts of unequal lengths are packed. One line each.

A model is a class that owns a causal head, so that it is known which positions are read. All that
lies between its arguments and its attention must hand on what it does not know (``**kwargs``);
StableLM's does not.
"""

from __future__ import annotations

from optimus.core.backend import Mode
from optimus.core.replacement import Architecture, Replacement
from optimus.replacements._decoder import UnpaddedPrompts
from optimus.replacements._unpadding import PACKED_ON


def prompts(family: str, model: str) -> Architecture:
    """The row of ``model`` of the modeling file of ``family``."""
    row = Replacement(
        name=f"{family}.decoder.unpadded",
        targets=(f"transformers.models.{family}.modeling_{family}:{model}",),
        mixin=UnpaddedPrompts,
        modes=frozenset({Mode.INFERENCE}),
        backends=PACKED_ON,
    )
    return Architecture(model_type=family, replacements=(row,))


ARCHITECTURES = (
    prompts("gemma", "GemmaForCausalLM"),
    prompts("gpt2", "GPT2LMHeadModel"),
    prompts("gpt_neox", "GPTNeoXForCausalLM"),
    prompts("granite", "GraniteForCausalLM"),
    prompts("llama", "LlamaForCausalLM"),
    prompts("mistral", "MistralForCausalLM"),
    prompts("olmo2", "Olmo2ForCausalLM"),
    prompts("phi", "PhiForCausalLM"),
    prompts("phi3", "Phi3ForCausalLM"),
    prompts("qwen2", "Qwen2ForCausalLM"),
    prompts("qwen3", "Qwen3ForCausalLM"),
    prompts("smollm3", "SmolLM3ForCausalLM"),
    prompts("starcoder2", "Starcoder2ForCausalLM"),
)
