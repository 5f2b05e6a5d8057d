"""Parts of a decoder layer in one call each: the kernels, and when the model's own forward runs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import optimus
from optimus.core.errors import NothingToDoError
from optimus.ops import decoder, step
from optimus.ops.quantized import INT4, INT8, INT8_DYNAMIC, QuantizedWeight
from optimus.replacements._families import DECODER

# Relative errors of one operator: a few units of the last place.
WITHIN = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
DTYPES = tuple(WITHIN)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "granite", "mixtral")
# Those whose layers are llama's from end to end.
WHOLE = ("llama", "mistral", "qwen2", "qwen3")
PARTS = ("any.step.norm", "any.step.mlp", "any.step.attention")


INSIDE = (
    *("self_attn", "self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp", "mlp.up_proj", "mlp.down_proj", "mlp.act_fn", "input_layernorm"),
)


def distance(answer, exact):
    """Relative."""
    return float((answer.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2048), (3, 5, 37), (700, 128)])
def test_rms_norm(shape, dtype):
    """As the host's, whatever the width."""
    x, weight = (torch.randn(*one).to(dtype) for one in (shape, shape[-1:]))
    exact = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    assert distance(step.rms_norm(x, weight, 1e-5), exact) < WITHIN[dtype]


def test_rms_norm_of_what_is_not_finite():
    """NaN stays, in its own row alone."""
    x = torch.randn(2, 64)
    x[0, 3] = torch.nan
    out = step.rms_norm(x, torch.ones(64), 1e-5)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 37, 5632, 100_000])
def test_gate(count, dtype):
    """``silu(gate) * up``, far out on both sides, too."""
    opened, up = (10 * torch.randn(count).to(dtype) for _ in range(2))
    opened[1:2] = -200.0
    exact = F.silu(opened.double()) * up.double()
    assert distance(step.gate(opened.clone(), up), exact) < WITHIN[dtype]


def test_gate_keeps_nan():
    """A NaN on either side comes out."""
    opened, up = torch.randn(2, 40)
    opened[3], up[5] = torch.nan, torch.nan
    assert step.gate(opened, up).isnan().nonzero().flatten().tolist() == [3, 5]


@pytest.mark.parametrize("scheme", [INT8, INT8_DYNAMIC, INT4])
@pytest.mark.parametrize("rows", [1, 7, 64, 65])
def test_products_are_those_of_each(scheme, rows):
    """Bit for bit, with biases and without."""
    weights = [QuantizedWeight(torch.randn(out, 96), scheme) for out in (96, 40, 17)]
    biases = [torch.randn(96), None, torch.randn(17)]
    x = torch.randn(rows, 96)
    found = step.products(x, weights, biases)
    for one, weight, bias in zip(found, weights, biases, strict=True):
        assert torch.equal(one, weight.matmul(x, bias))


def turned(x, cos, sin):
    """Rotary positions by halves."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 20, 64, 128])
@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (6, 1), (5, 5)])
@pytest.mark.parametrize("mask", ["none", "bool", "added"])
def test_attend(dtype, dim, heads, mask):
    """As SDPA over the keys so far, and the new key and value are written behind them."""
    batch, past, room, groups = 3, 21, 30, heads[1]
    query = torch.randn(batch, 1, heads[0] * dim).to(dtype)
    key, value = torch.randn(2, batch, 1, groups * dim).to(dtype)
    angle = torch.randn(batch, 1, dim // 2).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    keys, values = torch.randn(2, batch, groups, room, dim).to(dtype)
    before = keys.clone(), values.clone()
    scale = dim**-0.5
    hidden = torch.rand(batch, 1, 1, past + 1) < 0.3
    given = {"none": None, "bool": ~hidden, "added": hidden.float().mul(-9).to(dtype)}[mask]
    out = step.attend(query, key, value, (cos, sin), (keys, values), past, scale=scale, mask=given)
    q, k, v = (one.view(batch, -1, 1, dim).double() for one in (query, key, value))
    turns = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    q, k = turned(q, *turns), turned(k, *turns)
    assert distance(keys[:, :, past : past + 1], k) < WITHIN[dtype]
    assert torch.equal(values[:, :, past : past + 1], v.to(dtype))
    for now, then in zip((keys, values), before, strict=True):
        assert torch.equal(now[:, :, :past], then[:, :, :past])
        assert torch.equal(now[:, :, past + 1 :], then[:, :, past + 1 :])
    added = None if given is None else given if mask == "bool" else given.double()
    exact = F.scaled_dot_product_attention(
        q,
        torch.cat((before[0][:, :, :past].double(), k), 2).repeat_interleave(heads[0] // groups, 1),
        torch.cat((before[1][:, :, :past].double(), v), 2).repeat_interleave(heads[0] // groups, 1),
        attn_mask=added,
        scale=scale,
    )
    assert distance(out, exact.transpose(1, 2).flatten(2)) < 2 * WITHIN[dtype]


def test_attend_to_nothing():
    """A sequence of which every key is hidden comes out as zeros, as from SDPA."""
    query, key, value = torch.randn(3, 2, 1, 16)
    keys, values = torch.randn(2, 2, 1, 4, 16)
    turns = torch.ones(1, 1, 16), torch.zeros(1, 1, 16)
    mask = torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 1, 1, 3)
    out = step.attend(query, key, value, turns, (keys, values), 2, scale=1.0, mask=mask)
    assert out[0].abs().sum() > 0
    assert out[1].abs().sum() == 0


class Calls:
    """How often each function ran."""

    def __init__(self, monkeypatch):
        self.of = {}
        for module, name in ((step, "rms_norm"), (step, "gate"), (step, "attend")):
            monkeypatch.setattr(module, name, self.counted(name, getattr(module, name)))
        monkeypatch.setattr(decoder, "decode", self.counted("decode", decoder.decode))

    def counted(self, name, function):
        def call(*args, **kwargs):
            self.of[name] = self.of.get(name, 0) + 1
            return function(*args, **kwargs)

        return call


def build(family, width=256):
    """A tiny model with weights large enough that its tokens differ. The keys of a model 256 wide
    are too small to pack, and then its layers are taken part by part."""
    torch.manual_seed(0)
    more = {"mixtral": {"num_local_experts": 4}, "mistral": {"sliding_window": None}}
    config = CONFIG_MAPPING[family](**DECODER | {"hidden_size": width}, **more.get(family, {}))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model.eval()


def pair(family, recipe="int8", width=256):
    """The model by the recipe without its steps, and with them."""
    model = build(family, width)
    other = copy.deepcopy(model)
    rest = optimus.Recipe.named(recipe)
    only = optimus.Recipe("rest", (rest.stages[0], ("*.attention.grouped", "cpu.cache")))
    optimus.transform(model, only, check=False)
    optimus.transform(other, recipe, check=False)
    return model, other


def greedy(model, **options):
    """Twelve tokens after a ragged batch of prompts."""
    ids = torch.arange(3, 33).view(3, 10) % 90 + 3
    mask = torch.ones_like(ids)
    mask[1, :4], mask[2, :7] = 0, 0
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=12, min_new_tokens=12, pad_token_id=0, **options
    )


def agree(mine, stock):
    """The same logits at every step, as long as a row has the same tokens. A sum in another order
    may round an activation to the next of 255 steps, and a near-tie then goes the other way."""
    same = torch.ones(len(stock.sequences), dtype=torch.bool)
    for one, other in zip(mine.logits, stock.logits, strict=True):
        assert distance(one[same], other[same]) < 0.02
        same &= one.argmax(-1) == other.argmax(-1)
    assert same.sum() >= 2


@pytest.mark.parametrize("width", [256, 512])
@pytest.mark.parametrize("recipe", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounded_models_answer_alike(family, recipe, width, monkeypatch):
    """With padding, by greedy; and the steps are what ran."""
    stock, mine = pair(family, recipe, width)
    options = {"output_logits": True, "return_dict_in_generate": True}
    expected = greedy(stock, **options)
    calls = Calls(monkeypatch)
    agree(greedy(mine, **options), expected)
    whole = family in WHOLE and (width == 512 or family == "qwen3")
    assert calls.of.get("decode", 0) == (22 if whole else 0)
    assert calls.of.get("attend", 0) == (0 if whole else 22)
    assert calls.of["rms_norm"] > 0
    assert family == "mixtral" or calls.of["gate"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_same(family, monkeypatch):
    """Where nothing is rounded, by greedy and by beams, token for token."""
    stock, mine = build(family), build(family)
    optimus.transform(mine, check=False)
    expected = [greedy(stock, num_beams=beams) for beams in (1, 2)]
    calls = Calls(monkeypatch)
    for beams in (1, 2):
        assert torch.equal(greedy(mine, num_beams=beams), expected[beams - 1])
    assert calls.of["attend"] >= 22


def test_who_looks_gets_the_stock_forward():
    """A hook inside sees every call of it."""
    _, mine = pair("llama", width=512)
    layer = mine.model.layers[0]
    seen = []
    for name in INSIDE:
        layer.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    greedy(mine)
    assert all(seen.count(name) == 12 for name in INSIDE)


@pytest.mark.parametrize("name", INSIDE)
def test_each_part_may_be_watched(name, monkeypatch):
    """One hook takes its own layer apart, and no other."""
    stock, mine = pair("llama", width=512)
    mine.model.layers[1].get_submodule(name).register_forward_hook(lambda *_: None)
    options = {"output_logits": True, "return_dict_in_generate": True}
    calls = Calls(monkeypatch)
    agree(greedy(mine, **options), greedy(stock, **options))
    assert calls.of["decode"] == 11


def test_weights_of_attention_are_asked_for(monkeypatch):
    """Then the host answers as it does without us."""
    stock, mine = pair("llama")
    calls = Calls(monkeypatch)
    options = {"output_attentions": True, "return_dict_in_generate": True}
    options["output_logits"] = True
    agree(greedy(mine, **options), greedy(stock, **options))
    assert "attend" not in calls.of


def test_training_is_left_alone(monkeypatch):
    """With gradients the model's own operators run."""
    _, mine = pair("llama")
    calls = Calls(monkeypatch)
    mine(torch.arange(3, 9)[None]).logits.sum().backward()
    assert calls.of == {}


def test_a_cache_of_the_users_own(monkeypatch):
    """The host's cache is filled by the host."""
    from transformers import DynamicCache

    stock, mine = pair("llama")
    calls = Calls(monkeypatch)
    found = [greedy(m, past_key_values=DynamicCache(config=m.config)) for m in (stock, mine)]
    assert torch.equal(*found)
    assert "attend" not in calls.of


@pytest.mark.parametrize("part", PARTS)
def test_a_forward_that_changed_is_refused(part, monkeypatch):
    """By the names that it uses."""
    from transformers.models.llama import modeling_llama as host

    suffix = {"norm": "RMSNorm", "mlp": "MLP", "attention": "Attention"}[part.split(".")[2]]

    def forward(self, x):
        return self.something_new(x)

    monkeypatch.setattr(getattr(host, f"Llama{suffix}"), "forward", forward)
    with pytest.raises(NothingToDoError, match=r"not the one that is known here.*something_new"):
        optimus.plan(build("llama"), optimus.Recipe("one", ((part,),)))
