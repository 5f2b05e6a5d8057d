"""Generation on XLA: after the warm-up nothing is compiled, and the tokens are stock's."""

import random

import pytest
import torch
from transformers.cache_utils import DynamicCache

import optimus
from optimus.generation import Buckets, compilations, runs, warm_up

BUCKETS = Buckets(lengths=(64, 128), batches=(1, 2), room=512)
PROMPTS, LONGEST, NEW, FEW = 60, 480, 8, 5


@pytest.fixture(scope="module")
def ready(stock, moved, compiled, report):
    """A model that is warm."""
    model = optimus.transform(moved(stock))
    before = compiled()
    count = warm_up(model, BUCKETS)
    report(f"warm-up: {count} graphs, {compiled() - before} programs compiled with what is around")
    return model


def _prompts():
    """Rows of tokens and a mask; of two rows one is shorter, and padded on the left."""
    draw = random.Random(0)
    for number in range(PROMPTS):
        length, rows = draw.randint(1, LONGEST), 1 + number % 2
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(3, 256, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[1:, : draw.randint(0, length - 1)] = 0
        yield {"input_ids": ids * mask, "attention_mask": mask}


def _greedy(model, prompt, device="cpu", **more):
    given = {name: value.to(device) for name, value in prompt.items()}
    options = {"max_new_tokens": NEW, "do_sample": False, **more}
    return model.generate(**given, **options).cpu()


def test_nothing_is_compiled(stock, ready, compiled, report):
    """Prompts of any length and padding, from the device: 0 compilations, and stock's tokens."""
    before, same, seen = compiled(), 0, set()
    for prompt in _prompts():
        expected = _greedy(stock, prompt)
        seen.update(expected[:, -NEW:].flatten().tolist())
        same += torch.equal(_greedy(ready, prompt, "xla"), expected)
    new = compiled() - before
    report(f"static: {PROMPTS} prompts x {NEW} tokens, {new} programs compiled, {same} as stock")
    assert (same, new, compilations(ready)) == (PROMPTS, 0, 0)
    assert len(seen) > 100
    assert {graph.window for graph in runs(ready)} == set(BUCKETS.windows)


@torch.no_grad()
def test_stock_beside_it(stock, moved, compiled, report):
    """A cache that grows is a program a token."""
    model, prompt = moved(stock), next(_prompts())
    ids, cache, before = prompt["input_ids"].to("xla"), DynamicCache(config=stock.config), 0
    found = []
    for step in range(FEW):
        if step == 1:
            before = compiled()
        token = model(input_ids=ids, past_key_values=cache).logits[:, -1].argmax(-1)
        found.append(int(token))
        ids = token[:, None]
    new = compiled() - before
    report(f"stock-style decoding: 1 prompt, {FEW - 1} tokens behind it, {new} programs compiled")
    assert found == _greedy(stock, prompt)[0, -NEW:].tolist()[:FEW]
    assert new >= FEW - 1


def test_ends_of_text(stock, ready, compiled):
    """Rows that end at different tokens are padded from there, as stock's."""
    prompt = next(one for one in _prompts() if len(one["input_ids"]) == 2)
    tokens = _greedy(stock, prompt)[:, -NEW:]
    ends = [int(tokens[0, 2]), int(tokens[1, 5])]
    before = compiled()
    found = _greedy(ready, prompt, "xla", eos_token_id=ends, max_new_tokens=20)
    assert torch.equal(found, _greedy(stock, prompt, eos_token_id=ends, max_new_tokens=20))
    assert compiled() == before


def test_sampling(stock, ready, compiled):
    """Tokens are drawn on the CPU: the same for the same seed, and nothing is compiled."""
    prompt, before = next(_prompts()), compiled()
    options = {"do_sample": True, "top_k": 20, "temperature": 0.7}
    torch.manual_seed(3)
    expected = _greedy(stock, prompt, **options)
    torch.manual_seed(3)
    assert torch.equal(_greedy(ready, prompt, "xla", **options), expected)
    assert compiled() == before


def test_what_falls_back(ready, stock):
    """Beam search says so, and answers as stock, on the device of the prompt."""
    prompt = next(_prompts())
    short = {name: value[:, :5] for name, value in prompt.items()}
    with pytest.warns(UserWarning, match="falls back"):
        found = _greedy(ready, short, "xla", num_beams=2, max_new_tokens=2)
    assert torch.equal(found, _greedy(stock, short, num_beams=2, max_new_tokens=2))


def test_eight_bits_generate(wide, moved, compiled):
    """Rounded weights decode in static shapes: the tokens of the rounded weights on the CPU."""
    model = optimus.transform(moved(wide), "int8")
    rounded = {name: one for name, one in model.named_modules() if hasattr(one, "_packed")}
    dense = llama_of(rounded, wide)
    warm_up(model, Buckets(lengths=(32,), room=64))
    prompt, before = {"input_ids": torch.arange(3, 20)[None]}, compiled()
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    assert torch.equal(_greedy(model, prompt, "xla"), _greedy(dense, prompt))
    assert compiled() == before


def llama_of(rounded, stock):
    """A model on the CPU with the weights as rounded; a tied head has codes of its own."""
    import copy

    twin = copy.deepcopy(stock)
    twin.lm_head.weight = torch.nn.Parameter(twin.lm_head.weight.detach().clone())
    for name, module in rounded.items():
        dense = module._packed.dense().cpu()
        twin.get_submodule(name).weight.data.copy_(dense)
    return twin
