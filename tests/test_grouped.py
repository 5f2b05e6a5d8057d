"""Decoders on SDPA by way of the third registered pair: stock answers, and the better route."""

from __future__ import annotations

import copy
import functools
import importlib

import pytest
import torch
import transformers
from models import masks, words
from snapshots import distance as distance_at
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import optimus
from optimus.core.registry import Registry
from optimus.replacements import _grouped
from optimus.replacements._families import DECODER
from optimus.replacements.decoders import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = Registry(ARCHITECTURES)
CLOSE = 5e-6
SIZES = DECODER | {"hidden_size": 64, "max_position_embeddings": 128, "eos_token_id": None}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 2,
}
KINDS = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "latent": ("DeepseekV3Config", LATENT),
    "indexed": ("DeepseekV32Config", LATENT | {"index_topk": 3, "index_head_dim": 16}),
}
EVERY = pytest.mark.parametrize("kind", KINDS)


def config_of(kind, **changes):
    """The tiny config of that kind."""
    name, sizes = KINDS[kind]
    return getattr(transformers, name)(**(SIZES | sizes | changes))


@functools.cache
def _built(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config_of(kind)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def pair(kind):
    """The stock model on sdpa, and its twin transformed by the rows of ``decoders`` alone."""
    stock, mine = copy.deepcopy(_built(kind)), copy.deepcopy(_built(kind))
    plan = optimus.plan(mine, registry=ROWS)
    assert [claim.path for claim in plan.claims] == ["model"]
    return stock, optimus.apply(mine, plan, registry=ROWS)


def distance(answer, expected, mask=None):
    """How far apart they are at real tokens, or everywhere."""
    return distance_at(answer, expected, mask)


def logits(model, ids, **kwargs):
    """What the model says, without gradients."""
    with torch.no_grad():
        return model(ids, **kwargs).logits


class Kernels(TorchDispatchMode):
    """Writes down the fused calls: the shapes of queries and keys."""

    def __init__(self):
        super().__init__()
        self.fused = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.fused.append((tuple(args[0].shape), tuple(args[1].shape)))
        return func(*args, **(kwargs or {}))


class Attention(nn.Module):
    """What an attention layer shows of itself to the host's function."""

    is_causal = True

    def __init__(self, groups=1):
        super().__init__()
        self.num_key_value_groups = groups


def tensors(heads, groups, rows, length, width, value_width=None):
    """Queries, keys and values of a batch of two."""
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, rows, width), (groups, length, width), (groups, length, value_width or width)
    return [torch.randn((2, *shape), generator=generator) for shape in shapes]


@EVERY
@pytest.mark.parametrize("padding", ["none", "ones", "right", "left", "hole", "single"])
def test_answers(kind, padding):
    """The same logits at every real token, in batches of three and of one."""
    stock, mine = pair(kind)
    mask = masks()[padding]
    ids = words(mask, 0)
    for rows in (slice(None), slice(1)):
        given = {} if mask is None else {"attention_mask": mask[rows]}
        expected, answer = (logits(m, ids[rows], **given) for m in (stock, mine))
        assert distance(answer, expected, None if mask is None else mask[rows]) <= CLOSE


@EVERY
@pytest.mark.parametrize(
    "how", [{}, {"cache_implementation": "static"}, {"num_beams": 3}, {"use_cache": False}]
)
def test_fifty_tokens(kind, how):
    """The same fifty tokens after a left-padded prompt: greedy, static cache, beams, no cache."""
    mask = masks()["left"]
    sizes = {"max_new_tokens": 50, "min_new_tokens": 50, "do_sample": False, "pad_token_id": 0}
    expected, answer = (
        model.generate(words(mask, 0), attention_mask=mask, **sizes, **how) for model in pair(kind)
    )
    assert expected.shape == (3, 59)
    assert torch.equal(answer, expected)


@EVERY
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_continuation(kind, padded, static):
    """The same logits for four tokens, then one, after a prompt that the cache holds."""
    ids = words(None, 0)
    mask = masks()["left"] if padded else torch.ones_like(ids)
    answers = []
    for model in pair(kind):
        cache = StaticCache(model.config, 12) if static else DynamicCache(config=model.config)
        for part in (slice(0, 4), slice(4, 8), slice(8, 9)):
            given = {"attention_mask": mask[:, : part.stop]} if padded else {}
            answers.append(logits(model, ids[:, part], past_key_values=cache, **given))
    for expected, answer, part in zip(answers[:3], answers[3:], (4, 8, 9), strict=True):
        real = mask[:, :part][:, -expected.shape[1] :]
        assert distance(answer, expected, real) <= CLOSE


@EVERY
def test_gradients(kind):
    """A call that records gradients is the host's, to the bit, and with dropout too."""
    stock, mine = pair(kind)
    mask = masks()["right"]
    for model in (stock, mine):
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.3
        model.train()
        torch.manual_seed(3)
        model(words(mask, 0), attention_mask=mask).logits[mask.bool()].pow(2).mean().backward()
    grads = [[p.grad for p in model.parameters()] for model in (stock, mine)]
    # What an indexer selects by has no gradient on either side.
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*grads, strict=True))


def captured(model, *args, **kwargs):
    """The arguments of every attention call in the whole graph of a compiled model."""
    calls = []

    def backend(graph, _):
        for node in graph.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                shapes = [n.meta["example_value"].shape for n in node.args[:3]]
                calls.append((shapes, node.kwargs))
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        answer = torch.compile(model, backend=backend, fullgraph=True)(*args, **kwargs).logits
    return calls, answer


def test_compiled_decode_copies_no_keys():
    """One token on a static cache, compiled whole: the keys of two heads, as the cache has them."""
    stock, mine = pair("llama")
    ids, answers, seen = words(None, 0), [], []
    for model in (stock, mine):
        cache = StaticCache(model.config, max_cache_len=16)
        logits(model, ids, past_key_values=cache)
        calls, answer = captured(model, ids[:, :1], past_key_values=cache)
        answers.append(answer)
        seen.append(calls)
    assert {tuple(shapes[1]) for shapes, _ in seen[0]} == {(3, 4, 16, 16)}
    assert {tuple(map(tuple, shapes)) for shapes, _ in seen[1]} == {
        ((3, 2, 2, 16), (3, 2, 16, 16), (3, 2, 16, 16))
    }
    assert all(kwargs["attn_mask"] is not None for _, kwargs in seen[1])
    assert distance(answers[1], answers[0]) <= CLOSE


def test_compiled_prompt_copies_no_keys():
    """A padded prompt, compiled whole: a mask, and the keys of two heads."""
    stock, mine = pair("llama")
    mask = masks()["left"]
    expected = logits(stock, words(mask, 0), attention_mask=mask)
    calls, answer = captured(mine, words(mask, 0), attention_mask=mask)
    assert [tuple(shapes[1]) for shapes, _ in calls] == [(3, 2, 9, 16)] * 2
    assert all(k["enable_gqa"] and k["attn_mask"] is not None for _, k in calls)
    assert distance(answer, expected, mask) <= CLOSE


def is_flagged(call):
    """Whether an attention call is causal by the flag, and has no mask."""
    return call[1]["is_causal"] is True and call[1]["attn_mask"] is None


@pytest.fixture
def careful_host(monkeypatch):
    """A host whose Dynamo says that it exports whenever it compiles, as it did up to torch 2.13."""
    said = torch.compiler.is_compiling
    monkeypatch.setattr("transformers.masking_utils.is_torchdynamo_exporting", said)


@pytest.mark.usefixtures("careful_host")
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_compiled_causal_mask_is_a_flag(kind):
    """Compiled without a mask, a prompt no longer than the window has the flag, which that host
    would not give it.
    """
    stock, mine = pair(kind)
    ids = words(None, 0)[:, :5]
    assert not any(map(is_flagged, captured(stock, ids)[0]))
    calls, answer = captured(mine, ids)
    assert all(map(is_flagged, calls))
    assert distance(answer, logits(stock, ids)) <= CLOSE


@pytest.mark.usefixtures("careful_host")
@pytest.mark.parametrize("case", ["padded", "all ones", "packed", "window", "continued"])
def test_compiled_mask_is_kept(case):
    """Padding, values that tracing cannot read, packing, a window and a past stay a mask."""
    stock, mine = pair("mistral" if case == "window" else "llama")
    ids, real, given, past = words(None, 0), None, {}, (None, None)
    if case in ("padded", "all ones"):
        real = masks()["left" if case == "padded" else "ones"]
        given = {"attention_mask": real}
    if case == "packed":
        positions = torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 1]).expand(3, 9)
        given = {"position_ids": positions, "use_cache": False}
    if case == "continued":
        past = [DynamicCache(config=model.config) for model in (stock, mine)]
        logits(stock, ids, past_key_values=past[0])
        logits(mine, ids, past_key_values=past[1])
    told = [given if case != "continued" else {"past_key_values": cache} for cache in past]
    calls, answer = captured(mine, ids, **told[1])
    assert all(kwargs["attn_mask"] is not None for _, kwargs in calls)
    assert distance(answer, logits(stock, ids, **told[0]), real) <= CLOSE


@pytest.mark.parametrize("kind", ["llama", "latent"])
def test_export(kind):
    """An exported model is right at lengths other than the one that it was exported with."""
    stock, mine = pair(kind)
    ids = words(None, 0)
    length = torch.export.Dim("length", min=2, max=64)
    shapes = {"input_ids": {1: length}, "use_cache": None}
    given = {"input_ids": ids, "use_cache": False}
    exported = torch.export.export(mine, (), given, dynamic_shapes=shapes).module()
    for other in (ids, ids[:, :3], ids.repeat(1, 4)):
        answer = exported(input_ids=other, use_cache=False).logits
        assert distance(answer, logits(stock, other)) <= CLOSE


@pytest.mark.parametrize("rows", [1, 5, 9])
@pytest.mark.parametrize("masked", [None, "shared", "of heads", "float"])
def test_groups_share_their_keys(rows, masked):
    """The host's numbers for every shape of mask, by the fused kernel, from keys not repeated."""
    query, key, value = tensors(8, 2, rows, 9, 16)
    mask = None
    if masked:
        heads = 8 if masked == "of heads" else 1
        mask = torch.rand(2, heads, rows, 9, generator=torch.Generator().manual_seed(1)) > 0.3
        mask[..., 0] = True
        mask = mask.float().log() if masked == "float" else mask
    layer = Attention(groups=4)
    expected = sdpa_attention_forward(layer, query, key, value, mask)[0]
    with Kernels() as kernels:
        answer = _grouped.grouped_attention(layer, query, key, value, mask)[0]
    assert distance(answer, expected) <= CLOSE
    assert answer.shape == expected.shape
    assert answer.is_contiguous()
    assert [keys[1] for _, keys in kernels.fused] == [2]


@pytest.mark.parametrize(
    ("rows", "length", "widths", "fused"),
    [
        (32, 32, (24, 16), True),
        (1, 32, (24, 16), False),
        (2, 128, (24, 16), False),
        (4, 128, (24, 16), True),
        (64, 64, (192, 128), True),
        (128, 128, (192, 128), False),
        (192, 192, (192, 128), True),
        (32, 32, (16, 24), False),
    ],
)
def test_narrow_values(rows, length, widths, fused):
    """Values are filled up for the fused kernel where that pays; the numbers are the host's."""
    query, key, value = tensors(2, 2, rows, length, *widths)
    mask = torch.ones(rows, length, dtype=torch.bool).tril(length - rows).expand(2, 1, -1, -1)
    for given in (mask,) if rows != length else (mask, None):
        expected = sdpa_attention_forward(Attention(), query, key, value, given)[0]
        with Kernels() as kernels:
            answer = _grouped.grouped_attention(Attention(), query, key, value, given)[0]
        assert distance(answer, expected) <= CLOSE
        assert answer.shape == expected.shape
        assert answer.is_contiguous()
        assert bool(kernels.fused) is fused


@pytest.mark.parametrize("name", ["s_aux", "sinks"])
def test_sinks_are_not_lost(name):
    """Sinks, which SDPA would swallow, are an error that says what to do."""
    query, key, value = tensors(4, 2, 3, 3, 16)
    with pytest.raises(ValueError, match=r"sinks.*attn_implementation='eager'"):
        _grouped.grouped_attention(Attention(2), query, key, value, None, **{name: query})


def refusal(model):
    """Why the rows leave the model alone."""
    plan = optimus.plan(model, registry=ROWS)
    assert plan.claims == ()
    return " ".join(why.reason for *_, why in plan.refusals)


def from_config(config, **options):
    """A model that nobody runs."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, **options)


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"num_key_value_heads": 4}, {}, "keys of its own, as wide as its values: 1.0x"),
        ({}, {"attn_implementation": "eager"}, "attention is eager"),
        ({"attn_logit_softcapping": 30.0}, {}, "attn_logit_softcapping"),
    ],
)
def test_refusals(changes, options, reason):
    """Heads with keys of their own, another attention and a soft cap: refused, and why."""
    assert reason in refusal(from_config(config_of("llama", **changes), **options))


def test_refuses_what_would_be_lost():
    """Weights asked for, sinks, an indexer that half floats would mislead: refused by the plan."""
    weights, sinks = from_config(config_of("llama")), from_config(config_of("llama"))
    vars(weights.config)["_output_attentions"] = True
    sinks.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(4))
    assert "asks for attention weights" in refusal(weights)
    assert "has sinks" in refusal(sinks)
    assert "indexer" in refusal(from_config(config_of("indexed"), dtype=torch.bfloat16))


def test_refuses_training():
    """The fused backward does not pay, so that training is refused."""
    plan = optimus.plan(from_config(config_of("llama")), mode="training", registry=ROWS)
    assert [why.reason for *_, why in plan.refusals] == ["not for training"]


@pytest.mark.parametrize(("name", "knows"), [("gemma4", True), ("deepseek_v32", False)])
def test_knows_who_asks_for_the_name(name, knows):
    """A modeling file that asks which attention is on would miss its own; an indexer does not."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    assert _grouped._branches_on_name(module.__name__) is knows


def test_rows_name_classes_that_exist():
    """Every row's target is a model of the installed transformers, with a type that it knows."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for architecture in ARCHITECTURES:
        module, _, name = architecture.replacements[0].targets[0].partition(":")
        assert architecture.model_type in CONFIG_MAPPING
        assert hasattr(importlib.import_module(module), name), name
