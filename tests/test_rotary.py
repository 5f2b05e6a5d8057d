"""Rotary in real arithmetic: the rows of deepseek_v2 and llama4, held to the laws where they hold.

No HPU and no XLA device is there. ``XLA`` is a double: a name that rows ask for, on this CPU.
"""

from __future__ import annotations

import copy
import functools
import warnings

import laws
import pytest
import torch
import transformers
from models import Case, batch, masks, stir
from snapshots import distance, identical, snapshot
from torch import nn
from uses import watch

import optimus
from optimus.core.replacement import Architecture
from optimus.ops.real import complex_steps
from optimus.replacements._families import DECODER

pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = 1e-6
XLA = optimus.Backend("xla", "cpu")
SIZES = DECODER | {"hidden_size": 64, "intermediate_size": 96, "eos_token_id": 2}
HEAD = "AutoModelForCausalLM"


def deepseek_v2():
    """A dense layer and one of experts."""
    return transformers.DeepseekV2Config(
        **SIZES | {"num_key_value_heads": 4},
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )


def llama4():
    """A layer with positions and one without."""
    return transformers.Llama4TextConfig(
        **SIZES,
        head_dim=16,
        intermediate_size_mlp=96,
        moe_layers=[1],
        num_local_experts=4,
        no_rope_layers=[1, 0],
        attention_chunk_size=6,
    )


@functools.cache
def _vision():
    torch.manual_seed(0)
    config = transformers.Llama4VisionConfig(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        projector_input_dim=64,
        projector_output_dim=64,
        vision_output_dim=64,
    )
    model = transformers.Llama4VisionModel(config).eval()
    stir(model)
    return model


def vision():
    """Llama 4's tower, seeded, and three images."""
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return copy.deepcopy(_vision()), {"pixel_values": images}


DECODERS = [
    Case(Architecture(model_type=tiny.__name__, replacements=(), tiny=tiny), HEAD)
    for tiny in (deepseek_v2, llama4)
]
EVERY = [*DECODERS, "vision"]
ON = pytest.mark.parametrize("case", DECODERS, ids=str)
ON_ALL = pytest.mark.parametrize("case", EVERY, ids=str)
LAWS = (
    laws.silence,
    laws.equivalence,
    laws.keys,
    laws.loading,
    laws.returning,
    laws.training,
    laws.idempotence,
    laws.independence,
    laws.neighbours,
    laws.accelerate_hooks,
    laws.tying,
    laws.graph,
)


def built(case):
    """The model of a case, and arguments for it: a ragged batch where there is text."""
    if case == "vision":
        return vision()
    return (model := case.build()), batch(model)


def real_of(stock, mode="compile"):
    """A copy for a compiler."""
    return optimus.transform(copy.deepcopy(stock), mode=mode, check=False)


def answered(model, given):
    """What it answers."""
    with torch.no_grad():
        return model(**given)


def apart(mine, stock, given):
    """How far two answers are apart where there is a token."""
    return distance(mine, stock, given.get("attention_mask"))


def rotary(plan):
    """The sites that the rows of this file take."""
    return [claim.path for claim in plan.claims if claim.replacement.endswith(".rotary.real")]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@ON
def test_law(case, law):
    """The laws, where the rows are used uncompiled, too."""
    assert len(rotary(optimus.plan(case.build(), backend=XLA))) == 3
    law(case, XLA)


@ON_ALL
def test_plan(case, capable):
    """For compilers, exporters, HPU and XLA; elsewhere the plan says what it would cost."""
    model, _ = built(case)
    for mode in ("compile", "export"):
        assert len(rotary(optimus.plan(model, backend=capable, mode=mode))) == 3
    for name in ("hpu", "xla"):
        assert len(rotary(optimus.plan(model, backend=optimus.Backend(name, name)))) == 3
    for mode in ("inference", "training"):
        plan = optimus.plan(model, backend=capable, mode=mode)
        assert rotary(plan) == []
        assert "one token 0.83x to 0.97x" in str(plan)


@ON_ALL
def test_compiled_graph(case):
    """In whole, without a complex step, and right."""
    stock, given = built(case)
    expected, mine = answered(stock, given), real_of(stock)
    steps, graphs = [], []

    def look(module, inputs):
        graphs.append(module)
        steps.extend(complex_steps(module))
        return module.forward

    torch._dynamo.reset()
    found = answered(torch.compile(mine, backend=look, fullgraph=True), given)
    assert (len(graphs), steps) == (1, [])
    assert apart(found, expected, given) <= CLOSE


@ON_ALL
def test_exported_graph(case):
    """The same of torch.export, whose program has no complex table either."""
    stock, given = built(case)
    if case != "vision":
        given["use_cache"] = False
        stock.set_experts_implementation("batched_mm")
    program = torch.export.export(real_of(stock, "export"), (), given)
    assert complex_steps(program.graph_module) == []
    assert not any(t.is_complex() for t in program.constants.values())
    assert list(program.state_dict) == list(stock.state_dict())
    assert apart(program.module()(**given), answered(stock, given), given) <= CLOSE


@pytest.mark.parametrize(
    "case", [*(pytest.param(c, marks=pytest.mark.sweep) for c in DECODERS), "vision"], ids=str
)
def test_inductor_is_content(case):
    """It does not warn of complex operators, as it does for a stock model."""
    from torch._inductor import lowering

    stock, given = built(case)
    mine = real_of(stock)
    for model in (stock, mine):
        del model.model.layers[1:]
    lowering._warn_complex_not_supported.cache_clear()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*complex.*")
        found = answered(torch.compile(mine, fullgraph=True), given)
    assert apart(found, answered(stock, given), given) <= CLOSE


@ON
@pytest.mark.parametrize("kind", ["right", "left", "hole"])
def test_ragged_prompts_and_their_cache(case, kind):
    """A ragged prompt and three tokens after it, one by one, from a cache."""
    stock = case.build()
    mine = real_of(stock)
    caches = [transformers.DynamicCache(config=m.config) for m in (stock, mine)]
    given, mask = batch(stock, kind), masks()[kind]
    for step in range(4):
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, -given["input_ids"].shape[1] :]
        expected, found = (
            answered(m, {**given, "position_ids": places, "past_key_values": c})
            for m, c in zip((stock, mine), caches, strict=True)
        )
        assert apart(found.logits, expected.logits, given if step == 0 else {}) <= 5 * CLOSE
        mask = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], 1)
        given = {"input_ids": expected.logits[:, -1:].argmax(-1), "attention_mask": mask}


def test_vision_is_given_back():
    """Bitwise, with its complex table, after moves and casts and from a copy."""
    model, given = vision()
    before, expected = snapshot(model), answered(model, given)
    keys = list(model.state_dict())
    optimus.transform(model, mode="compile", sample=given)
    assert list(model.state_dict()) == keys
    assert not any(buffer.is_complex() for buffer in model.buffers())
    twin = copy.deepcopy(model).double().float().to("cpu")
    assert apart(answered(twin, given), expected, given) <= CLOSE
    for one in (twin, model):
        optimus.reverse(one)
        assert identical(answered(one, given), expected)
    assert snapshot(model) == before


def test_persistent_tables_keep_their_key():
    """Where the table is in the checkpoint, it is there under its key, and loads from there."""
    model, given = vision()
    table = model.rotary_embedding
    table._non_persistent_buffers_set.clear()
    stock = copy.deepcopy(model)
    stock.rotary_embedding.freqs_ci.mul_(1j)
    state = copy.deepcopy(stock.state_dict())
    for assign in (False, True):
        mine = real_of(model)
        assert mine.state_dict()["rotary_embedding.freqs_ci"].equal(table.freqs_ci)
        mine.load_state_dict(state, strict=True, assign=assign)
        assert apart(answered(mine, given), answered(stock, given), given) <= CLOSE
        optimus.reverse(mine)
        assert mine.rotary_embedding.freqs_ci.equal(stock.rotary_embedding.freqs_ci)


class Own(transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2Attention):
    """Remote code with a forward of its own."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def _skipped(model):
    return model, optimus.Recipe("r", (("*",),), skip=("*.0.self_attn",))


def _without_reader(model):
    return nn.ModuleList([model.model.rotary_emb]), "auto"


def _overridden(model):
    model.model.layers[1].self_attn.__class__ = Own
    return model, "auto"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_skipped, "model.layers.0.self_attn is skipped"),
        (_without_reader, "there is no DeepseekV2Attention"),
        (_overridden, "layers.1.self_attn: Own overrides the forward"),
    ],
)
def test_all_or_none(change, reason):
    """A table in a new form that somebody reads in the old one would be wrong numbers."""
    model, recipe = change(DECODERS[0].build())
    plan = optimus.plan(model, recipe, mode="compile")
    assert rotary(plan) == []
    assert reason in str(plan)


@ON
def test_hooks(case):
    """Law 9: every module but the one that makes the table hands on what it did."""
    stock = case.build()
    mine = real_of(stock)
    seen, seen_of_stock = watch(mine), watch(stock)
    for model in (stock, mine):
        answered(model, batch(model))
    made, made_by_stock = ([one for one in s if "rotary" in one[0]] for s in (seen, seen_of_stock))
    others = [[one for one in s if "rotary" not in one[0]] for s in (seen, seen_of_stock)]
    assert others[0] == others[1]
    assert made[1][1][-1] == (*made_by_stock[1][1][-1], 2)


@ON
def test_training(case):
    """Gradients are those of the stock model."""
    stock = case.build()
    mine = real_of(stock)
    for model in (stock, mine):
        model(**batch(model)).logits.pow(2).mean().backward()
    pairs = zip(mine.named_parameters(), stock.named_parameters(), strict=True)
    far = {n: distance(a.grad, b.grad, None) for (n, a), (_, b) in pairs if b.grad is not None}
    assert max(far.values()) <= 5 * CLOSE
