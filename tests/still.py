"""Tiny models in static shapes, and prompts for them."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

import optimus
from optimus.core.backend import CPUS
from optimus.core.registry import Registry
from optimus.generation import Buckets, warm_up
from optimus.generation.runner import Eager
from optimus.passes._static import Static

SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GPT = {"vocab_size": 99, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL),
    "gpt2": lambda: transformers.GPT2Config(**GPT, bos_token_id=1, eos_token_id=None),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SMALL),
    "olmoe": lambda: transformers.OlmoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**SMALL, "head_dim": None, "num_key_value_heads": 6},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=8,
        moe_intermediate_size=16,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
    ),
}
FEW = Buckets(lengths=(16, 32), batches=(1, 4), room=128)


def build(family: str = "llama", **changes: Any) -> Any:
    """A tiny model with weights large enough that its tokens differ."""
    torch.manual_seed(0)
    config = CONFIGS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    model.generation_config.pad_token_id = 0
    return model.eval()


def registry(make: Any) -> Registry:
    """What is installed, and ``static.test`` on a runner of the test's."""
    known = Registry.installed()
    return Registry(known.architectures, (*known.passes, Static("static.test", CPUS, make)))


def static(model: Any, buckets: Buckets = FEW, make: Any = Eager, *more: str) -> Any:
    """The model in static shapes, warmed up."""
    recipe = optimus.Recipe("static", (("static.test",), *((name,) for name in more)))
    optimus.transform(model, recipe, registry=registry(make), check=False)
    warm_up(model, buckets)
    return model


def pair(family: str = "llama", *given: Any, **changes: Any) -> tuple[Any, Any]:
    """Stock, and its twin in static shapes."""
    stock = build(family, **changes)
    return stock, static(copy.deepcopy(stock), *given)


def prompts(count: int, longest: int, rows: int = 1, seed: int = 0) -> list[dict[str, Tensor]]:
    """Prompts of random lengths; with several rows, every other is padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randint, generator=generator)
    found = []
    for number in range(count):
        length, batch = int(draw(1, longest + 1, ())), int(draw(1, rows + 1, ()))
        ids = draw(1, 99, (batch, length))
        begins = draw(0, length, (batch, 1)) * (number % 2)
        begins[0] = 0
        mask = (torch.arange(length) >= begins).long()
        found.append({"input_ids": ids * mask, "attention_mask": mask})
    return found


def generate(model: Any, given: dict[str, Tensor], new: int = 16, **options: Any) -> Any:
    """Greedy unless told otherwise, from a seed, without a warning."""
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return model.generate(**given, **{"max_new_tokens": new, "do_sample": False, **options})


def same(stock: Any, mine: Any, given: list[dict[str, Tensor]], **options: Any) -> None:
    """Both write the same tokens."""
    for one in given:
        assert torch.equal(generate(mine, one, **options), generate(stock, one, **options))
