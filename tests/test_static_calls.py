"""What ``generate`` is asked in static shapes: done, left to transformers, or refused."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
import transformers
from still import SMALL, build, generate, pair, prompts, same, static
from torch import Tensor, nn
from torch._inductor import config as inductor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation import (
    BaseStreamer,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

import optimus
from optimus.core.errors import BackendUnavailableError, BucketError, NothingToDoError, PlanError
from optimus.generation import Buckets, compilations, runs, warm_up

pytestmark = pytest.mark.usefixtures("one_thread")


def refuse_seven(ids: Tensor, scores: Tensor) -> Tensor:
    """A processor of the user's."""
    return scores.index_fill(1, torch.tensor([7]), -math.inf)


def stop_at_nines(ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
    """A criterion of the user's."""
    return ids[:, -1] % 9 == 0


@pytest.mark.parametrize(
    "options",
    [
        {"eos_token_id": 5},
        {"eos_token_id": [5, 6, 7, 8, 9, 10, 11, 12], "min_new_tokens": 5},
        {"eos_token_id": list(range(3, 60))},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        {"do_sample": True, "top_k": 20, "temperature": 0.7},
        {"do_sample": True, "num_return_sequences": 2},
        {"max_new_tokens": None, "max_length": 80},
        {"max_new_tokens": 1},
        {"logits_processor": LogitsProcessorList([refuse_seven])},
        {"stopping_criteria": StoppingCriteriaList([stop_at_nines]), "eos_token_id": 5},
        {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(60.0)])},
    ],
    ids="-".join,
)
def test_ways_to_generate(options: dict[str, Any]) -> None:
    """Ends, processors, samples and criteria are transformers', and the shapes stay."""
    stock, mine = pair()
    same(stock, mine, prompts(4, 60, rows=2, seed=1), **options)
    assert sum(runs(mine).values()) > 0
    assert compilations(mine) == 0


class Kept(BaseStreamer):
    """Every token that it is given."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []

    def put(self, value: Tensor) -> None:
        """One step's."""
        self.tokens.append(value.flatten().tolist())

    def end(self) -> None:
        """After the last."""
        self.tokens.append([])


def test_streams() -> None:
    """A streamer sees what it would of stock."""
    seen = []
    for model in pair():
        seen.append(Kept())
        generate(model, prompts(1, 30)[0], streamer=seen[-1], eos_token_id=5)
    assert seen[0].tokens == seen[1].tokens


def test_where_a_call_happens() -> None:
    """In inference mode, with a mask of ones, without a mask and with positions of one's own."""
    stock, mine = pair()
    ids = prompts(1, 40)[0]["input_ids"]
    with torch.inference_mode():
        same(stock, mine, [{"input_ids": ids.clone()}])
    same(stock, mine, [{"inputs": ids}, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    positions = torch.arange(3, 3 + ids.shape[1])[None]
    same(stock, mine, [{"input_ids": ids, "position_ids": positions}])
    assert torch.equal(mine.generate(ids, max_new_tokens=3), stock.generate(ids, max_new_tokens=3))


def falls_back(stock: Any, mine: Any, why: str, **options: Any) -> None:
    """The answer is stock's, and a warning says so, once."""
    given = {**prompts(1, 30)[0], "max_new_tokens": 8, "do_sample": False, **options}
    expected = stock.generate(**copy.deepcopy(given))
    with pytest.warns(UserWarning, match=why):
        found = mine.generate(**copy.deepcopy(given))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = mine.generate(**copy.deepcopy(given))
    for one in (found, again):
        tokens = getattr(one, "sequences", one)
        assert torch.equal(tokens, getattr(expected, "sequences", expected))
    assert not runs(mine)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_beams": 3}, "not for beam search"),
        ({"return_dict_in_generate": True, "output_scores": True}, "return_dict_in_generate"),
        ({"use_cache": False}, "the cache is to be another"),
        ({"cache_implementation": "static", "disable_compile": True}, "cache_implementation"),
        ({"prefill_chunk_size": 8}, "prefill_chunk_size"),
        ({"max_new_tokens": 120}, "exceed the room"),
    ],
    ids=str,
)
def test_falls_back(options: dict[str, Any], why: str) -> None:
    """What static shapes do not do, transformers does."""
    falls_back(*pair(), why, **options)


def test_falls_back_to_drafts_and_embeddings_and_caches() -> None:
    """So do calls that bring something along."""
    stock, mine = pair()
    falls_back(stock, mine, "not for assisted generation", assistant_model=build())
    cache = DynamicCache(config=stock.config)
    falls_back(stock, mine, "the cache is to be another", past_key_values=cache)
    embeds = torch.randn(1, 5, 48)
    falls_back(
        stock,
        mine,
        "inputs_embeds was given",
        input_ids=None,
        inputs_embeds=embeds,
        attention_mask=torch.ones(1, 5),
    )
    for model in (stock, mine):
        model.train()
    falls_back(stock, mine, "training mode")


def test_falls_back_under_autocast() -> None:
    """Which computes in another dtype than the cache is of."""
    stock, mine = pair()
    with torch.autocast("cpu", torch.bfloat16):
        falls_back(stock, mine, "autocast is on")


def test_an_empty_prompt() -> None:
    """What, where, and what to do."""
    mine = static(build())
    with pytest.raises(BucketError, match=r"the prompt is empty: input_ids is \[1, 0\]. Give"):
        mine.generate(torch.zeros(1, 0, dtype=torch.long))


def test_what_no_bucket_holds() -> None:
    """A prompt beyond the model's positions or the room, and too many rows."""
    mine = static(build())
    with pytest.raises(BucketError, match="prompt has 130 tokens, and there is room for 128"):
        generate(mine, {"input_ids": torch.ones(1, 130, dtype=torch.long)})
    with pytest.raises(BucketError, match="5 rows, and the largest batch bucket is 4"):
        generate(mine, {"input_ids": torch.ones(5, 3, dtype=torch.long)})
    assert not runs(mine)


@pytest.mark.parametrize(
    "wrong", [{"lengths": ()}, {"lengths": (0,)}, {"batches": (1.5,)}, {"room": 64}], ids=str
)
def test_wrong_buckets(wrong: dict[str, Any]) -> None:
    """Said when they are made."""
    with pytest.raises(ValueError, match="Buckets"):
        Buckets(**wrong)


def test_buckets_of_a_short_model() -> None:
    """No bucket is beyond the model's positions."""
    mine = static(build(max_position_embeddings=100), Buckets(room=4096))
    assert Buckets(room=4096).within(100) == Buckets(lengths=(100,), room=100)
    same(build(max_position_embeddings=100), mine, prompts(3, 80))
    assert {graph.window for graph in runs(mine)} == {100}


def refused(model: Any, **options: Any) -> str:
    """Why the plan leaves the model alone when it is asked by name."""
    with pytest.raises((NothingToDoError, BackendUnavailableError)) as error:
        optimus.plan(model, "static", **options)
    return str(error.value)


def test_what_the_plan_refuses() -> None:
    """Caches and inputs of another kind, and training."""
    of = AutoModelForCausalLM.from_config
    mistral = transformers.MistralConfig(**SMALL, sliding_window=16)
    assert "StaticSlidingWindowLayer" in refused(of(mistral))
    mamba = transformers.MambaConfig(num_hidden_layers=1, hidden_size=8, vocab_size=9)
    assert "takes no position_ids, past_key_values" in refused(of(mamba))
    t5 = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    assert "decoders alone" in refused(transformers.T5ForConditionalGeneration(t5))
    assert "does not generate" in refused(nn.Linear(2, 2))
    assert "not for training" in refused(build(), mode="training")
    falcon = {**SMALL, "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8}
    assert "not one graph" in refused(of(transformers.FalconH1Config(**falcon)))
    qwen = {**SMALL, "layer_types": ["linear_attention", "full_attention"]}
    assert "LinearAttentionLayer" in refused(of(transformers.Qwen3NextConfig(**qwen)))
    long = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "dynamic rotary" in refused(build(rope_parameters=long))
    with pytest.raises(PlanError, match="does not generate in static shapes"):
        warm_up(build())


def test_without_a_compiler() -> None:
    """The plan says what is missing and what to do."""
    with inductor.patch({"cpp.cxx": (None, "no-such-compiler")}):
        assert "finds no C++ compiler on this machine. Install g++, or name" in refused(build())


def test_only_by_name() -> None:
    """Who asks for everything keeps transformers' own cache; a GPU has a way of its own."""
    assert not [name for name in optimus.plan(build()).passes if name.startswith("static.")]
    assert optimus.plan(build(), "static").passes[0] == "static.inductor"
    there = optimus.plan(build(), "static", backend=optimus.Backend("cuda", "cuda"))
    assert all(name.startswith("static.cuda") for name in there.passes)
    assert there.passes
