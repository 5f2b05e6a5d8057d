"""Models whose attention asks the host for its function: every row, against stock eager."""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import zoo
from snapshots import distance, identical, snapshot
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.models.gemma2 import modeling_gemma2
from zoo.configs import parts
from zoo.models import build_from, stir

import optimus
from optimus.cli import list as listing
from optimus.core.planner import Recipe
from optimus.core.registry import Registry
from optimus.core.replacement import SHORTEST, Architecture
from optimus.ops import capped
from optimus.ops.sinks import sink_attention
from optimus.replacements import _attention
from optimus.replacements._families import fused
from optimus.replacements.hosted import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("one_thread")

ONLY = Recipe("attention", (("*.attention.fused",),))
TOLERANCE = 5e-6
WRITING = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", "AutoModelForCausalLM")
SEEING = ("AutoModelForImageTextToText",)
# What makes a tiny config one of the kind that the row is for.
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": None},
    "hubert": {"mask_time_prob": 0.0},
    "informer": {"attention_type": "full"},
    "longt5": {"decoder_start_token_id": 1},
    "patchtsmixer": {"self_attn": True},
    "switch_transformers": {"decoder_start_token_id": 1},
    "t5": {"decoder_start_token_id": 1},
    "t5gemma": {"attn_logit_softcapping": None},
    "vaultgemma": {"attn_logit_softcapping": None},
    "wav2vec2": {"mask_time_prob": 0.0},
}
# Composites that are slow to build or hard to feed: the part that the row is for.
PARTS = {
    "align": ("AlignTextModel", "text_config"),
    "blip-2": ("Blip2VisionModel", "vision_config"),
    "clap": ("ClapTextModel", "text_config"),
}
# Soft-capped by a config that cannot be without: no backward pass, and nothing else to test here.
ROWS = [a.model_type for a in ARCHITECTURES if a.model_type != "videoprism"]


def stock_of(model_type: str, **changes: Any) -> nn.Module:
    """A tiny model of the type that runs eager."""
    config = zoo.tiny(model_type)
    for key, value in (CHANGES.get(model_type, {}) | changes).items():
        for part in [p for p in parts(config) if p is config or hasattr(p, key)]:
            setattr(part, key, value)
    if model_type not in PARTS:
        return build_from(config, zoo.heads(model_type)[0], "eager", torch.float32, 0)
    name, part = PARTS[model_type]
    cls = getattr(transformers, name)
    model = cls._from_config(getattr(config, part), attn_implementation="eager")
    stir(model)
    return model.eval()


def fused_of(stock: nn.Module, backend: optimus.Backend, **options: Any) -> nn.Module:
    """A transformed copy."""
    return optimus.transform(copy.deepcopy(stock), ONLY, backend=backend, check=False, **options)


def answer(model: nn.Module, given: dict[str, Tensor], **options: Any) -> Any:
    """What the model says, from one random state: some draw queries or mask patches."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        return model(**given, **options)


def refusals(model: nn.Module, backend: optimus.Backend, **options: Any) -> list[str]:
    """Why sites of the model keep their attention."""
    found = optimus.plan(model, backend=backend, **options).refusals
    return [why.reason for _, name, why in found if name.endswith("attention.fused")]


@pytest.mark.parametrize("model_type", ROWS)
def test_every_row_answers_as_stock(model_type, capable, monkeypatch):
    """Unpadded, padded on any side, one sequence and three: all of it on the kernel."""
    stock = stock_of(model_type)
    mine = fused_of(stock, capable)

    def stray(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a call left the kernel")

    monkeypatch.setattr(_attention, "_stock", stray)
    for padding in ("none", "left", "right", "ragged"):
        for batch in (1, 3):
            given = zoo.inputs(stock, batch=batch, padding=padding)
            apart = distance(answer(mine, given), answer(stock, given), given.get("attention_mask"))
            assert apart <= TOLERANCE or apart <= drift_of_host(stock, given), (padding, batch)


def drift_of_host(stock: nn.Module, given: dict[str, Tensor]) -> float:
    """How far the stock model is from itself in float64: CLIP's logits may cancel out."""
    exact = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    wide = answer(copy.deepcopy(stock).double(), exact)
    return distance(answer(stock, given), wide, given.get("attention_mask"))


GENERATING = [t for t in ROWS if t not in PARTS and zoo.heads(t)[0] in WRITING + SEEING]


@pytest.mark.parametrize("model_type", GENERATING)
def test_generation_is_the_same(model_type, capable):
    """Fifty greedy tokens, through self-attention and cross-attention caches."""
    stock = stock_of(model_type)
    mine = fused_of(stock, capable)
    encodes = stock.config.is_encoder_decoder
    given = zoo.inputs(stock, padding="right" if encodes else "left")
    given.pop("decoder_input_ids", None)
    sizes = {"max_new_tokens": 50, "min_new_tokens": 50, "do_sample": False}
    tokens = [model.generate(**given, **sizes) for model in (stock, mine)]
    assert torch.equal(*tokens)


def gradients(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """What one backward pass leaves on every parameter, without dropout; routers have noise."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for key in [k for k, v in vars(module).items() if "drop" in k and isinstance(v, float)]:
            setattr(module, key, 0.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        output = model(**given)[0]
    mask = given.get("decoder_attention_mask", given.get("attention_mask"))
    real = mask.bool() if mask is not None and mask.shape == output.shape[:2] else ...
    output[real].float().pow(2).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model_type", ROWS)
def test_gradients_are_the_same(model_type, capable):
    """Of every parameter, sinks among them, next to the largest."""
    stock = stock_of(model_type)
    taught = fused_of(stock, capable, mode="training")
    given = zoo.inputs(stock)
    theirs, mine = gradients(stock, given), gradients(taught, given)
    assert theirs.keys() == mine.keys()
    scale = max(float(g.norm()) for g in theirs.values())
    far = {k: float((mine[k] - g).norm()) / scale for k, g in theirs.items()}
    assert max(far.values()) <= TOLERANCE


@pytest.mark.parametrize("model_type", ["switch_transformers", "longt5", "t5"])
def test_a_learned_bias_gets_its_gradient(model_type, capable):
    """The table of relative positions learns: no kernel has a gradient for it."""
    stock = stock_of(model_type)
    taught = fused_of(stock, capable, mode="training")
    given = zoo.inputs(stock)
    theirs, mine = gradients(stock, given), gradients(taught, given)
    tables = [name for name in theirs if "relative_attention_bias" in name]
    assert tables
    for name in tables:
        assert theirs[name].count_nonzero() > 0
        assert (mine[name] - theirs[name]).norm() <= TOLERANCE * theirs[name].norm()


@pytest.mark.parametrize("model_type", ["gpt_oss", "inkling2", "t5"])
def test_compiled_in_one_graph(model_type, capable):
    """Sinks a head, sinks a token and a position bias, traced without a break."""
    stock = stock_of(model_type, num_hidden_layers=1)
    given = zoo.inputs(stock)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    mine = torch.compile(fused_of(stock, capable), backend=counter, fullgraph=True)
    apart = distance(answer(mine, given), answer(stock, given), given["attention_mask"])
    assert (counter.frame_count, apart <= TOLERANCE) == (1, True)


@pytest.mark.parametrize("model_type", ["bart", "gpt_oss", "clip"])
def test_weights_asked_for_are_the_stock_ones(model_type, capable):
    """``output_attentions=True``: the stock function, to the bit."""
    stock = stock_of(model_type)
    given = zoo.inputs(stock)
    answers = [
        answer(model, given, output_attentions=True) for model in (fused_of(stock, capable), stock)
    ]
    assert identical(*answers)


def test_weights_given_unasked_are_still_given(capable):
    """BridgeTower's cross-modal layers share the text model's config, not its switch."""
    stock = stock_of("bridgetower")
    mine = fused_of(stock, capable)
    given = zoo.inputs(stock)
    theirs, ours = answer(stock, given).attentions, answer(mine, given).attentions
    assert len(ours) == len(theirs) > 0
    assert all(weights is not None for pair in ours for weights in pair)


@pytest.mark.parametrize("model_type", ["bart", "gpt_oss"])
def test_dropout_in_training_is_the_stock_one(model_type, capable):
    """The same random numbers drop the same weights."""
    stock = stock_of(model_type, attention_dropout=0.5)
    taught = fused_of(stock, capable, mode="training")
    given = zoo.inputs(stock)
    answers = [answer(model.train(), given) for model in (taught, stock)]
    assert identical(*answers)


@pytest.mark.parametrize("model_type", ["bart", "t5", "bridgetower", "informer", "inkling2"])
def test_reverse_gives_every_config_back(model_type, capable):
    """One config for two stacks, one each, and one that part of its users kept."""
    model = stock_of(model_type)
    before = snapshot(model)
    optimus.transform(model, ONLY, backend=capable, check=False)
    assert snapshot(model) != before
    answer(model, zoo.inputs(model))
    optimus.reverse(model)
    assert snapshot(model) == before


def test_nothing_to_look_at(capable):
    """A call without a single key takes the stock path, which has an answer to it."""
    layer = fused_of(stock_of("gpt_oss"), capable).model.layers[0].self_attn
    query, nothing = torch.ones(1, 4, 3, 16), torch.ones(1, 2, 0, 16)
    options = {"scaling": 1.0, "s_aux": layer.sinks}
    out, _ = _attention.fused_attention(layer, query, nothing, nothing, None, **options)
    assert torch.equal(out, torch.zeros(1, 3, 4, 16))


def test_refusals_say_why(capable):
    """What cannot run on the kernel is named with its reason, and the rest is claimed."""
    (capped,) = refusals(zoo.build("gemma2"), capable, mode="training")
    assert "no backward pass through a soft cap of 50" in capped
    sparse = stock_of("informer", attention_type="prob")
    assert refusals(sparse, capable) == [
        "its attention does not ask the host: InformerProbSparseAttention"
    ]
    assert any("LongT5LocalAttention" in why for why in refusals(stock_of("longt5"), capable))
    (mixer,) = refusals(stock_of("patchtsmixer", self_attn=False), capable)
    assert "does not ask the host" in mixer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile", [1, 40, 1 << 20])
def test_a_soft_cap_by_tiles(tile, dtype, monkeypatch):
    """The model's own eager answer, whatever the tile, with grouped heads and a mask of floats."""
    monkeypatch.setattr(capped, "TILE", tile)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 7, 16, generator=generator).to(dtype) * 4 for heads in (4, 2, 2)
    )
    mask = torch.full((2, 1, 7, 7), torch.finfo(dtype).min, dtype=dtype).triu(1)
    mask[1, ..., :3] = torch.finfo(dtype).min
    module = SimpleNamespace(num_key_value_groups=2, training=False)
    for given in (mask, mask[:1], None):
        expected, _ = modeling_gemma2.eager_attention_forward(
            module, query, key, value, given, scaling=0.25, softcap=5.0
        )
        found = capped.capped_attention(query, key, value, given, 0.25, 5.0)
        close = {torch.float32: TOLERANCE, torch.bfloat16: 4e-3}[dtype]
        assert distance(found.transpose(1, 2), expected, None) <= close
    learned = query.clone().requires_grad_()
    assert capped.capped_attention(learned, key, value, mask, 0.25, 5.0) is None


def test_a_soft_cap_under_compile(capable):
    """The compiler fuses the model's own steps: one graph, the same answer."""
    stock = zoo.build("gemma2")
    mine, given = fused_of(stock, capable), zoo.inputs(stock)
    with torch.no_grad():
        expected = stock(**given).logits
        torch.testing.assert_close(mine(**given).logits, expected, rtol=1e-5, atol=1e-6)
        found = torch.compile(mine, backend="eager", fullgraph=True)(**given).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_soft_cap_over_a_few_keys_is_stock(capable, monkeypatch):
    """The table's shortest length reaches the layers, which are all that sees a call's keys."""
    mine = fused_of(zoo.build("gemma2"), capable)
    given = zoo.inputs(mine, batch=2)
    layers = mine.model.limited()[1:]
    assert len(layers) == mine.config.num_hidden_layers
    calls = []
    monkeypatch.setattr(_attention, "attention", lambda *a, **k: None)
    monkeypatch.setattr(
        _attention, "capped_attention", lambda *a: calls.append(1) or capped.capped_attention(*a)
    )
    answer(mine, given)
    assert not calls
    for layer in layers:
        assert vars(layer)[SHORTEST] > given["input_ids"].shape[1]
        vars(layer)[SHORTEST] = 1
    answer(mine, given)
    assert len(calls) == len(layers)


def test_probsparse_queries_keep_their_attention(capable):
    """The decoder of such an Informer is claimed for its cross-attention, and stays right."""
    stock = stock_of("informer", attention_type="prob")
    mine = fused_of(stock, capable)
    given = zoo.inputs(stock)
    assert distance(answer(mine, given), answer(stock, given), None) <= TOLERANCE


def naive(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Attention with one more logit a row."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = query @ key.mT * scale + mask
    sinks = sinks.unsqueeze(-1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value


@pytest.mark.parametrize("dims", [(64, 64), (63, 63), (24, 16), (16, 24)], ids=str)
@pytest.mark.parametrize("each", ["head", "token"])
@pytest.mark.parametrize("length", [1, 7])
def test_sinks_and_all_their_gradients(dims, each, length):
    """Grouped heads, odd and unequal widths, a row that may see nothing; in float64."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.requires_grad_()

    wide, narrow = dims
    query = made(2, length, 4, wide).transpose(1, 2)
    key, value = made(2, 2, 9, wide), made(2, 2, 9, narrow)
    sinks = made(1, 4, 1) if each == "head" else made(2, 4, length)
    mask = torch.zeros(2, 1, length, 9, dtype=torch.float64)
    mask[0, :, 0] = mask[1, ..., :3] = torch.finfo(torch.float64).min
    given = (query, key, value, sinks)
    expected, out = naive(*given, mask, 0.3), sink_attention(*given, mask, 0.3)
    torch.testing.assert_close(out, expected)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    mine = torch.autograd.grad((out * weight).sum(), given)
    torch.testing.assert_close(mine, torch.autograd.grad((expected * weight).sum(), given))


def test_one_type_may_have_several_rows():
    """Each is listed, the type once, and a name still belongs to one."""
    several = [
        Architecture(model_type="git", replacements=(fused(family, "Model"),))
        for family in ("git_text", "git_image")
    ]
    shown = listing.rows(Registry(several))
    assert [row[-1] for row in shown] == ["git"]
    assert inspect.signature(Architecture).parameters["tiny"].default is None
