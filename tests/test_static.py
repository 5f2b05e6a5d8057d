"""Generation in static shapes: stock's tokens, and nothing compiled after the warm-up."""

from __future__ import annotations

import copy
import functools
import math
import threading
from typing import Any

import laws
import pytest
import torch
import zoo
from models import case
from snapshots import snapshot
from still import CONFIGS, FEW, build, generate, pair, prompts, registry, same, static
from torch import Tensor
from transformers.generation import (
    LogitsProcessorList,
)

import optimus
from optimus.cli.progress import Steps
from optimus.generation import Buckets, Graph, compilations, runs, warm_up
from optimus.generation.runner import Compiled, Eager
from optimus.passes._static import unfit

pytestmark = pytest.mark.usefixtures("one_thread")

LAWS = (
    laws.keys,
    laws.loading,
    laws.returning,
    laws.idempotence,
    laws.independence,
    laws.neighbours,
    laws.company,
    laws.accelerate_hooks,
    laws.tying,
)


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
    recipe = optimus.Recipe("one", (("static.test",),))
    optimus.transform(mine, recipe, registry=registry(Eager), check=False)
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


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", zoo.model_types())
def test_every_decoder(model_type: str) -> None:
    """Of every type that writes words: stock's tokens in static shapes, or a reason why not."""
    stock = decoder(model_type)
    if stock is None or unfit(stock):
        return
    mine = static(copy.deepcopy(stock), Buckets(lengths=(8, 16), batches=(4,), room=64))
    same(stock, mine, prompts(4, 30, rows=4), new=8)
    assert compilations(mine) == 0


def decoder(model_type: str) -> Any:
    """A tiny model under a head that makes words; None where the type has none."""
    try:
        model: Any = zoo.build(model_type, head="AutoModelForCausalLM")
    except (ImportError, ValueError):
        return None
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def test_many_prompts() -> None:
    """Fewer, operator by operator, where a new shape counts as a graph."""
    stock = long_llama()
    mine = static(copy.deepcopy(stock), Buckets())
    same(stock, mine, prompts(50, 1500), new=4)
    assert compilations(mine) == 0


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_laws(law: Any, capable: Any) -> None:
    """A model in static shapes keeps the laws; none of them generates."""
    law(case("llama", "AutoModelForCausalLM", recipe="static"), capable)


def test_progress() -> None:
    """Each graph is told before it is made, and the end; the command line has a bar for it."""
    told: list[tuple[int, int, str]] = []
    mine = static(build())
    with Steps("compiling") as bar:
        warm_up(mine, FEW, progress=bar.told)
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
