"""Prompts of unequal lengths, packed: stock's answers and cache, and stock where it must be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from models import LENGTH, WORDS, Case, batch, case, masks, words
from snapshots import distance
from torch import Tensor
from transformers import DynamicCache, StaticCache

import optimus
from optimus.replacements import _decoder, _unpadding, causal

pytestmark = pytest.mark.usefixtures("one_thread")

HEAD = "AutoModelForCausalLM"
TYPES = [row.model_type for row in causal.ARCHITECTURES]
LLAMA = case("llama", HEAD)
FP32 = 1e-5


@pytest.fixture(name="packed")
def _packed(monkeypatch):
    """How many tokens each packed call had."""
    seen: list[int] = []
    stock = _decoder.UnpaddedPrompts._unpadded

    def count(self: Any, call: Any, inputs: dict[str, Any], ragged: Any) -> Any:
        seen.append(sum(ragged.lengths))
        return stock(self, call, inputs, ragged)

    monkeypatch.setattr(_decoder.UnpaddedPrompts, "_unpadded", count)
    return seen


def twins(model_type: str, capable: optimus.Backend) -> tuple[Any, Any]:
    """As ``both``, of any type."""
    stock = zoo.build(model_type, head=HEAD)
    mine = optimus.transform(copy.deepcopy(stock), backend=capable, check=False)
    return stock, mine


def both(one: Case, capable: optimus.Backend, **changes: Any) -> tuple[Any, Any]:
    """Stock, and its twin with everything that ``auto`` does."""
    mine = optimus.transform(one.build(**changes), backend=capable, check=False)
    return one.build(**changes), mine


def ragged(kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """Ids with their mask, and the mask; positions as ``generate`` counts them."""
    mask = masks()[kind]
    assert mask is not None
    places = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"input_ids": words(mask, 0), "attention_mask": mask, "position_ids": places}
    return given, mask


def states(cache: Any) -> list[Tensor]:
    """Keys and values of every layer, ``[batch, length, heads, dim]``."""
    return [t.transpose(1, 2) for layer in cache.layers for t in (layer.keys, layer.values)]


@pytest.mark.parametrize("kind", ["left", "right", "hole", "empty-row"])
@pytest.mark.parametrize("model_type", TYPES)
def test_answers(model_type, kind, capable, packed):
    """Logits, hidden states and the cache are stock's at real tokens, and zero elsewhere."""
    stock, mine = twins(model_type, capable)
    given, mask = ragged(kind)
    with torch.no_grad():
        a, b = (m(**given, output_hidden_states=True) for m in (mine, stock))
    assert packed == [int(mask.sum())]
    assert list(a) == list(b)
    assert distance(a, b, mask) < FP32
    for ours, theirs in zip(states(a.past_key_values), states(b.past_key_values), strict=True):
        # A layer with a window keeps the last places.
        kept = mask[:, -theirs.shape[1] :]
        assert ours.shape == theirs.shape
        assert distance(ours, theirs, kept) < FP32
        assert not ours[kept == 0].any()
    assert not any(t[mask == 0].any() for t in (a.logits, *a.hidden_states))


@pytest.mark.parametrize("model_type", TYPES)
def test_generation(model_type, capable, packed, monkeypatch):
    """A prompt is packed, what follows is not; the tokens are stock's, in pieces, too."""
    stock, mine = twins(model_type, capable)
    given, mask = ragged("left")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    del given["position_ids"]
    expected = stock.generate(**given, **options)
    assert torch.equal(mine.generate(**given, **options), expected)
    assert packed == [int(mask.sum())]
    monkeypatch.setattr(_unpadding, "MOST_TOKENS", 5)
    assert torch.equal(mine.generate(**given, **options), expected)
    beams = {**options, "num_beams": 2}
    assert torch.equal(mine.generate(**given, **beams), stock.generate(**given, **beams))


@pytest.mark.parametrize("model_type", ["mistral", "qwen2"])
def test_window(model_type, capable, packed):
    """A window counts the places of a padded row, and the cache keeps those that stock keeps."""
    changes = {"sliding_window": 3}
    if model_type == "qwen2":
        changes |= {
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"],
        }
    stock, mine = both(case(model_type, HEAD), capable, **changes)
    for kind in ("left", "right", "hole"):
        given, mask = ragged(kind)
        with torch.no_grad():
            a, b = (m(**given) for m in (mine, stock))
        assert packed.pop() == int(mask.sum())
        assert distance(a.logits, b.logits, mask) < FP32
        for ours, theirs in zip(states(a.past_key_values), states(b.past_key_values), strict=True):
            assert distance(ours, theirs, mask[:, -theirs.shape[1] :]) < FP32


def test_given_cache(capable, packed):
    """An empty dynamic cache of the user's is filled, and the next call goes on from it."""
    stock, mine = both(LLAMA, capable)
    given, mask = ragged("left")
    del given["position_ids"]
    answers = []
    for model in (mine, stock):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            first = model(**given, past_key_values=cache, logits_to_keep=1)
            assert first.past_key_values is cache
            longer = torch.cat([mask, mask.new_ones(3, 1)], 1)
            ids = first.logits[:, -1:].argmax(-1)
            then = model(input_ids=ids, attention_mask=longer, past_key_values=cache)
        answers.append((first.logits, then.logits))
    assert packed == [int(mask.sum())]
    for ours, theirs in zip(*answers, strict=True):
        assert distance(ours[:, -1], theirs[:, -1], None) < FP32


def test_kept_logits(capable, packed):
    """Only the logits that are wanted are made, in every piece."""
    stock, mine = both(LLAMA, capable)
    mask = torch.ones(4, LENGTH, dtype=torch.long)
    mask[0, :5] = mask[2, :3] = 0
    given = {"input_ids": words(mask, 0), "attention_mask": mask}
    for keep in (1, 3):
        with torch.no_grad():
            a, b = (m(**given, logits_to_keep=keep).logits for m in (mine, stock))
        assert a.shape == b.shape
        assert distance(a, b, None) < FP32
    assert len(packed) == 2


def other_calls() -> dict[str, dict[str, Any]]:
    """What a call may ask for that is for the padded layout."""
    given, mask = ragged("left")
    labels = given["input_ids"].masked_fill(mask == 0, -100)
    config = LLAMA.architecture.tiny()
    return {
        "labels": {"labels": labels},
        "attentions": {"output_attentions": True},
        "some-logits": {"logits_to_keep": torch.tensor([LENGTH - 1])},
        "static": {"past_key_values": StaticCache(config=config, max_cache_len=32)},
        "cache-unused": {"past_key_values": DynamicCache(config=config), "use_cache": False},
        "more": {"cache_position": torch.arange(LENGTH)},
    }


@pytest.mark.parametrize("label", other_calls())
def test_stock_path(label, capable, packed):
    """A call that needs the padded layout gets it, and stock's answer."""
    stock, mine = both(LLAMA, capable)
    given, _ = ragged("left")
    with torch.no_grad():
        a, b = (m(**given, **other_calls()[label]) for m in (mine, stock))
    assert not packed
    # Also where there is no token: attention and linear layers are all that differs.
    assert list(a) == list(b)
    assert distance(a.logits[:, -1], b.logits[:, -1], None) < FP32
    if label == "labels":
        assert distance(a.loss, b.loss, None) < FP32


def test_right_padded_last_logit(capable, packed):
    """A logit that is kept of a place without a token is stock's."""
    stock, mine = both(LLAMA, capable)
    given, _ = ragged("right")
    with torch.no_grad():
        a, b = (m(**given, logits_to_keep=1).logits for m in (mine, stock))
    assert not packed
    assert distance(a, b, None) < FP32


def test_nothing_padded(capable, packed):
    """Full batches, batches without a mask, and single rows are stock's business."""
    _, mine = both(LLAMA, capable)
    with torch.no_grad():
        for kind in ("none", "ones", "single"):
            mine(**batch(mine, kind))
    assert not packed


def test_watched(capable, packed):
    """A hook on an inner module sees padded batches, and packing resumes when it is gone."""
    _, mine = both(LLAMA, capable)
    given, _ = ragged("left")
    seen: list[Any] = []
    handle = mine.model.layers[0].mlp.register_forward_hook(lambda m, i, o: seen.append(o.shape))
    with torch.no_grad():
        mine(**given)
        assert seen == [(3, LENGTH, mine.config.hidden_size)]
        assert not packed
        handle.remove()
        mine(**given)
    assert len(packed) == 1


def test_changed_attention(capable, packed):
    """Attention that the user switched since is his, and knows nothing of packed tokens."""
    stock, mine = both(LLAMA, capable)
    given, mask = ragged("left")
    mine.set_attn_implementation("eager")
    with torch.no_grad():
        a, b = (m(**given).logits for m in (mine, stock))
    assert not packed
    assert distance(a, b, mask) < FP32


def test_refused(capable):
    """Who reads both ways, an encoder, or how long a prompt is, is left alone with the reason."""
    cross = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=99)
    cross.add_cross_attention = True
    both_ways, growing = LLAMA.architecture.tiny(), LLAMA.architecture.tiny()
    both_ways.is_causal = False
    growing.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    reasons = {"attends to an encoder": cross, "not causal": both_ways, "longest prompt": growing}
    for why, config in reasons.items():
        model = transformers.AutoModelForCausalLM.from_config(config)
        refusals = optimus.plan(model, backend=capable).refusals
        (found,) = (r for _, name, r in refusals if name.endswith(".decoder.unpadded"))
        assert why in found.reason


def test_any_mask(capable):
    """No mask whatsoever makes packed prompts answer differently at a real token."""
    stock, mine = both(LLAMA, capable)
    bits = st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH)

    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(st.lists(bits, min_size=1, max_size=4), st.integers(1, 50))
    def holds(drawn: list[list[bool]], first: int) -> None:
        mask = torch.tensor(drawn).long()
        ids = (torch.arange(mask.numel()).view_as(mask) * 7 + first) % (WORDS - 1) + 1
        with torch.no_grad():
            answers = [m(input_ids=ids, attention_mask=mask).logits for m in (mine, stock)]
        assert distance(*answers, mask) < FP32

    holds()


@pytest.mark.parametrize("recipe", ["int8", "bf16"])
def test_recipes(recipe, capable, packed):
    """Packing takes nothing from what a recipe does to the rest."""
    one = LLAMA
    plain = optimus.transform(one.build(), recipe, backend=capable, check=False)
    given, mask = ragged("left")
    with torch.no_grad():
        mine = plain(**given).logits
        assert packed == [int(mask.sum())]
        padded = plain(**given, cache_position=torch.arange(LENGTH)).logits
    assert len(packed) == 1
    assert distance(mine, padded, mask) < (FP32 if recipe == "int8" else 3e-2)
    again = copy.deepcopy(plain)
    with torch.no_grad():
        assert torch.equal(again(**given).logits, mine)


def test_eager(capable, packed):
    """Who asked for eager attention keeps it for his prompts."""
    stock, mine = both(case("llama", HEAD, attention="eager"), capable)
    given, mask = ragged("left")
    with torch.no_grad():
        assert distance(mine(**given).logits, stock(**given).logits, mask) < FP32
    assert not packed


def test_not_handed_on(capable, packed, monkeypatch):
    """Where a layer forgets which prompts there are, the answer is stock's all the same."""
    stock, mine = both(LLAMA, capable)
    attention = type(mine.model.layers[1].self_attn)
    forward = attention.forward

    def forgetful(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.layer_idx == 1:
            kwargs.pop("sequences", None)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", forgetful)
    given, mask = ragged("left")
    with torch.no_grad():
        a, b = (m(**given) for m in (mine, stock))
    assert len(packed) == 1
    assert distance(a, b, mask) < FP32
    assert a.past_key_values.get_seq_length() == LENGTH
