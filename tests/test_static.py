"""Generation in static shapes: stock's tokens, and nothing compiled after the warm-up."""

from __future__ import annotations

import copy
import functools
import math
import threading
import warnings
from typing import Any

import pytest
import torch
import transformers
from snapshots import snapshot
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation import (
    BaseStreamer,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

import optimus
from optimus.core.backend import CPUS
from optimus.core.errors import BackendUnavailableError, BucketError, NothingToDoError, PlanError
from optimus.core.registry import Registry
from optimus.generation import Buckets, Graph, compilations, runs, warm_up
from optimus.generation.runner import Compiled, Eager
from optimus.passes._static import Static

pytestmark = pytest.mark.usefixtures("one_thread")

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


@pytest.mark.parametrize("family", CONFIGS)
def test_same_tokens(family: str) -> None:
    """Of ragged batches, through every bucket and section by section, with what auto does, too."""
    stock = build(family)
    every = prompts(10, 100, rows=4)
    expected = [generate(stock, one) for one in every]
    for more in ((), ("*",)):
        mine = static(copy.deepcopy(stock), FEW, Eager, *more)
        assert all(torch.equal(generate(mine, a), b) for a, b in zip(every, expected, strict=True))
        assert compilations(mine) == 0


def same(stock: Any, mine: Any, given: list[dict[str, Tensor]], **options: Any) -> None:
    """Both write the same tokens."""
    for one in given:
        assert torch.equal(generate(mine, one, **options), generate(stock, one, **options))


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
    ids=str,
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


def test_nothing_is_compiled_after_the_warm_up() -> None:
    """Twelve lengths, in graphs of dynamo's without a break: two for each window."""
    buckets = Buckets(lengths=(16, 32), room=64)
    stock = build(num_hidden_layers=1)
    made = functools.partial(Compiled, "eager")
    mine = static(copy.deepcopy(stock), buckets, made)
    assert vars(mine)["_optimus_station"].runner.compilations == 2 * len(buckets.windows)
    same(stock, mine, prompts(12, 48))
    same(stock, mine, prompts(2, 20), new=5, do_sample=True, eos_token_id=7)
    assert compilations(mine) == 0


def test_what_is_not_warmed_up_is_counted() -> None:
    """And made when it is met."""
    mine = build()
    recipe = optimus.Recipe("static", (("static.eager",),))
    optimus.transform(mine, recipe, check=False)
    generate(mine, prompts(1, 1)[0], new=4)
    assert compilations(mine) == 2
    assert runs(mine) == {Graph("prefill", 1, 128, 128): 1, Graph("decode", 1, 1, 128): 3}


def long_llama() -> Any:
    """2,048 positions in one small layer."""
    return build(max_position_embeddings=2048, num_hidden_layers=1, hidden_size=24)


def test_runs_are_what_the_buckets_imply() -> None:
    """A prompt of 1,500 and 256 new tokens: three sections and 255 single tokens."""
    stock = long_llama()
    mine = static(copy.deepcopy(stock), Buckets())
    given = {"input_ids": torch.randint(1, 99, (1, 1500))}
    same(stock, mine, [given], new=256)
    sections = [Graph("prefill", 1, 512, window) for window in (512, 1024, 2048)]
    assert runs(mine) == {**dict.fromkeys(sections, 1), Graph("decode", 1, 1, 2048): 255}
    assert compilations(mine) == 0


@pytest.mark.sweep
def test_two_hundred_prompts_by_inductor() -> None:
    """1 to 1,500 tokens, 16 new ones each: nothing compiled, and stock's tokens."""
    stock = long_llama()
    mine = static(copy.deepcopy(stock), Buckets(), Compiled)
    same(stock, mine, prompts(200, 1500))
    assert compilations(mine) == 0


def test_many_prompts() -> None:
    """Fewer, operator by operator, where a new shape counts as a graph."""
    stock = long_llama()
    mine = static(copy.deepcopy(stock), Buckets())
    same(stock, mine, prompts(50, 1500), new=4)
    assert compilations(mine) == 0


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
        optimus.plan(model, optimus.Recipe("static", (("static.eager",),)), **options)
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
    falcon = {**SMALL, "head_dim": None, "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8}
    assert "not one graph" in refused(of(transformers.FalconH1Config(**falcon)))
    qwen = {**SMALL, "layer_types": ["linear_attention", "full_attention"]}
    assert "LinearAttentionLayer" in refused(of(transformers.Qwen3NextConfig(**qwen)))
    long = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "dynamic rotary" in refused(build(rope_parameters=long))
    with pytest.raises(PlanError, match="does not generate in static shapes"):
        warm_up(build())


def test_only_by_name() -> None:
    """Who asks for everything keeps transformers' own cache."""
    assert not [name for name in optimus.plan(build()).passes if name.startswith("static.")]


def test_progress() -> None:
    """Each graph is told before it is made, and the end."""
    told: list[tuple[int, int, str]] = []
    mine = static(build())
    assert warm_up(mine, FEW, progress=lambda *one: told.append(one)) == len(told) - 1 == 16
    assert told[0] == (0, 16, "prefill_1x16_in_16")
    assert told[-1] == (16, 16, "ready")


def free(model: Any) -> list[Any]:
    """The slates that wait."""
    return list(vars(model)["_optimus_station"]._free)


def test_slates_are_used_again() -> None:
    """One for each batch bucket, and no call takes memory of its own."""
    stock, mine = pair()
    before = {id(one) for one in free(mine)}
    assert len(before) == 2
    same(stock, mine, prompts(6, 90, rows=4))
    assert {id(one) for one in free(mine)} == before


def test_two_threads() -> None:
    """Each call has a slate of its own."""
    stock, mine = pair()
    every = prompts(3, 90, rows=3)
    expected = [generate(stock, one) for one in every]
    found: dict[int, Tensor] = {}

    def work(number: int) -> None:
        for _ in range(3):
            found[number] = mine.generate(**every[number], max_new_tokens=16, do_sample=False)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(every))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[n], one) for n, one in enumerate(expected))
    assert len(free(mine)) <= 4


def test_not_a_number_does_not_stay() -> None:
    """A call that went wrong leaves nothing in the cache for the next."""
    stock, mine = pair()
    given = prompts(1, 30)[0]
    poison = mine.model.layers[0].register_forward_hook(lambda *args: args[2] * math.nan)
    generate(mine, given)
    poison.remove()
    same(stock, mine, [given])


def test_an_error_leaves_no_slate_behind() -> None:
    """Nobody is given what a call left half done."""
    stock, mine = pair()

    def fail(ids: Tensor, scores: Tensor) -> Tensor:
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        generate(mine, prompts(1, 9)[0], logits_processor=LogitsProcessorList([fail]))
    assert len(free(mine)) == 1
    same(stock, mine, prompts(2, 30))


def test_a_model_that_is_cast() -> None:
    """Its slates are, too."""
    stock, mine = pair()
    for model in (stock, mine):
        model.to(torch.float64)
    same(stock, mine, prompts(2, 40))
    assert {one.keys[0].dtype for one in free(mine)} == {torch.float64}


def test_copies_live_alone() -> None:
    """A copy has graphs and slates of its own."""
    stock, mine = pair()
    twin = copy.deepcopy(mine)
    same(stock, twin, prompts(2, 40))
    assert compilations(twin) > 0
    assert not runs(mine)
    optimus.reverse(twin)
    same(stock, mine, prompts(2, 40))


def test_reverse_leaves_nothing() -> None:
    """Neither the class nor the memory."""
    model = build()
    before = snapshot(model)
    static(model)
    generate(model, prompts(1, 20)[0])
    optimus.reverse(model)
    assert snapshot(model) == before


class Lazy(Eager):
    """A double of a device that compiles whatever is asked of it: it looks now and then, and
    prompts have to stay on the CPU."""

    looks = 4
    lazy = True


def test_looking_now_and_then() -> None:
    """What was written beyond the end is not returned."""
    stock, mine = pair("llama", FEW, Lazy)
    every = prompts(6, 60, rows=3, seed=2)
    for ends in (5, list(range(3, 50)), None):
        same(stock, mine, every, eos_token_id=ends)
    same(stock, mine, every, do_sample=True, eos_token_id=9)
