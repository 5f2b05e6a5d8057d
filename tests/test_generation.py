"""Caches with room: the same tokens as stock, whoever calls and however."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest
import torch
import transformers
from still import SMALL
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, T5ForConditionalGeneration

import optimus
from optimus.core.errors import NothingToDoError
from optimus.ops import native

CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=16),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=99, n_embd=48, n_layer=2, n_head=4, n_positions=128, eos_token_id=None
    ),
    "t5": lambda: transformers.T5Config(
        vocab_size=99,
        d_model=48,
        d_kv=12,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        eos_token_id=None,
        decoder_start_token_id=0,
    ),
}
ONE = torch.tensor([[5, 9, 41, 7, 13]])
# Rows of 5, 3 and 1 tokens, padded on the left.
RAGGED = torch.tensor([[5, 9, 41, 7, 13], [0, 0, 8, 30, 2], [0, 0, 0, 0, 17]])
TOLERANCE = 1e-5


def build(family: str) -> Any:
    """A tiny model with weights large enough that its tokens differ."""
    torch.manual_seed(0)
    config = CONFIGS[family]()
    seq2seq = T5ForConditionalGeneration if family == "t5" else AutoModelForCausalLM
    model = seq2seq(config) if family == "t5" else seq2seq.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    model.generation_config.pad_token_id = 0
    return model.eval()


def generate(model: Any, ids: torch.Tensor, new: int = 50, **options: Any) -> Any:
    """Greedy unless told otherwise."""
    settings = {"max_new_tokens": new, "do_sample": False, **options}
    return model.generate(ids, attention_mask=(ids != 0).long(), **settings)


def pooled(model: Any) -> int:
    """How many tensors wait in the model's pool."""
    return len(vars(model)["_optimus_pool"])


def transformed(family: str) -> tuple[Any, Any]:
    """Stock, and its twin with everything that ``auto`` does."""
    stock = build(family)
    return stock, optimus.transform(copy.deepcopy(stock))


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("ids", [ONE, RAGGED], ids=["one", "ragged"])
def test_same_tokens(family: str, ids: torch.Tensor) -> None:
    """Fifty greedy tokens are stock's, in the first call and in one that reuses the memory."""
    stock, mine = transformed(family)
    expected = generate(stock, ids)
    assert torch.equal(generate(mine, ids), expected)
    # Layers with a window keep the memory of the host.
    waiting = pooled(mine)
    assert waiting == (0 if family == "mistral" else 4)
    assert torch.equal(generate(mine, ids), expected)
    assert pooled(mine) == waiting


@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"do_sample": True, "top_k": 20},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 2, "num_return_sequences": 2, "early_stopping": True},
        {"cache_implementation": "static", "disable_compile": True},
        {"use_cache": False},
    ],
    ids=str,
)
def test_ways_to_generate(family: str, options: dict[str, Any]) -> None:
    """Beams, sampling with a seed and the user's own choice of a cache are transformers' own."""
    stock, mine = transformed(family)
    found = []
    for model in (stock, mine):
        torch.manual_seed(3)
        found.append(generate(model, RAGGED, new=12, **options))
    assert torch.equal(*found)


def test_assisted() -> None:
    """Drafts that are taken back crop the cache."""
    stock, mine = transformed("llama")
    torch.manual_seed(1)
    options = {"assistant_model": build("llama"), "new": 20}
    assert torch.equal(generate(mine, ONE, **options), generate(stock, ONE, **options))


def test_a_cache_of_the_users() -> None:
    """It is used as it is, and goes on where it stopped."""
    stock, mine = transformed("llama")
    caches = [DynamicCache(config=model.config) for model in (stock, mine)]
    prompts = [ONE, ONE]
    for _ in range(2):
        prompts = [
            generate(model, ids, new=4, past_key_values=cache)
            for model, cache, ids in zip((stock, mine), caches, prompts, strict=True)
        ]
        assert torch.equal(*prompts)
    assert pooled(mine) == 0


def test_a_cache_that_is_given_out() -> None:
    """What the user was handed is not written to by later calls, nor after a reverse."""
    _, mine = transformed("llama")
    output = generate(mine, ONE, return_dict_in_generate=True)
    assert pooled(mine) == 0
    kept = [layer.keys.clone() for layer in output.past_key_values.layers]
    generate(mine, RAGGED)
    optimus.reverse(mine)
    assert all(
        torch.equal(layer.keys, one)
        for layer, one in zip(output.past_key_values.layers, kept, strict=True)
    )
    twin = copy.deepcopy(output.past_key_values)
    assert torch.equal(twin.layers[0].keys, kept[0])


def test_a_tensor_that_is_kept() -> None:
    """Keys that a hook held on to are not handed to the next call."""
    _, mine = transformed("llama")
    kept: list[torch.Tensor] = []

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        kept.append(kwargs["past_key_values"].layers[0].keys)

    handle = mine.model.layers[0].self_attn.register_forward_hook(hook, with_kwargs=True)
    generate(mine, ONE, new=3)
    handle.remove()
    before = [one.clone() for one in kept]
    assert pooled(mine) == 3
    generate(mine, RAGGED, new=9)
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))


def test_two_threads() -> None:
    """Each call has memory of its own."""
    stock, mine = transformed("llama")
    prompts = [ONE, RAGGED, ONE.flip(1)]
    expected = [generate(stock, ids, new=25) for ids in prompts]
    found: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        for _ in range(2):
            found[number] = generate(mine, prompts[number], new=25)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[n], one) for n, one in enumerate(expected))
    gc.collect()
    assert pooled(mine) <= 4 * len(prompts)


def test_reverse_leaves_nothing() -> None:
    """Neither the pool nor the class."""
    stock, mine = transformed("llama")
    generate(mine, ONE)
    optimus.reverse(mine)
    assert type(mine) is type(stock)
    assert vars(mine).keys() == vars(stock).keys()
    assert torch.equal(generate(mine, ONE), generate(stock, ONE))


def test_with_gradients() -> None:
    """A forward that learns does not write into a shared tensor."""
    stock, mine = transformed("llama")
    losses = []
    for model in (stock, mine):
        cache = DynamicCache(config=model.config)
        model(input_ids=ONE, past_key_values=cache)
        loss = model(input_ids=ONE, past_key_values=cache).logits.float().pow(2).sum()
        loss.backward()
        losses.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)


def test_the_plan_of_what_does_not_generate_says_nothing_of_caches() -> None:
    """Neither done nor left; by name it is an error; what generates otherwise is told why not."""
    model = nn.Sequential(nn.Linear(256, 256)).eval()
    assert "cpu.cache" not in str(optimus.plan(model))
    with pytest.raises(NothingToDoError, match="does not generate"):
        optimus.plan(model, optimus.Recipe("one", (("cpu.cache",),)))
    decoder = build("llama")
    assert "cpu.cache" in optimus.plan(decoder).passes
    refused = optimus.plan(decoder, mode="training").refusals
    assert ("cpu.cache", "not for training") in [(name, why.reason) for _, name, why in refused]


def test_without_kernels_layers_are_the_models_own(monkeypatch):
    """The plan says what is missing."""
    monkeypatch.setattr(native, "steps", lambda: False)
    plan = optimus.plan(build("llama"))
    whys = {name: why for _, name, why in plan.refusals if name.startswith("any.step.")}
    assert len(whys) == 4
    assert all("no compiled kernel" in why.reason and why.hardware for why in whys.values())
    assert not [claim for claim in plan.claims if claim.replacement.startswith("any.step.")]
