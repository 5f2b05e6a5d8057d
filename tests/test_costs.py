"""Attention is claimed where the table says that it pays, from the length on where it does."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import sweep
import torch
import zoo
from models import case

import optimus
from optimus.core import costs
from optimus.core.backend import Backend, Context, Mode
from optimus.core.costs import Measured
from optimus.core.registry import Registry

X86 = Context(Backend("x86", "cpu"), Mode.INFERENCE, torch.float32)
TABLE = json.loads(Path(costs.__file__).parents[1].joinpath("costs.json").read_text())


@pytest.mark.parametrize(
    ("ratios", "shortest"),
    [
        ({32: 0.8, 128: 1.1, 512: 1.9}, 128),
        ({32: 1.1, 128: 0.9, 512: 1.9}, 512),
        ({32: 1.4, 128: 1.2}, 32),
        ({32: 0.8, 512: 1.2}, None),
        ({512: 1.9, 1024: 0.9}, None),
        ({128: 0.9, 2048: 3.0}, None),
    ],
)
def test_where_a_claim_holds(ratios, shortest):
    """From the first length on where it never is slower; not at all below 1.3x up to 1000 keys."""
    assert Measured(tuple(ratios.items()), "here").shortest == shortest


def test_the_table_is_of_what_there_is():
    """Names in the table are registered or patterns, and every figure says where it is from."""
    registry = Registry.installed()
    for part in TABLE.values():
        assert part["where"]
        for name, ratios in part["ratios"].items():
            assert registry.find(name)
            assert all(int(length) >= 16 and ratio > 0 for length, ratio in ratios.items())


def test_the_plan_quotes_the_figure():
    """A claim says what it rests on; a refusal says what was measured, or that nothing was."""
    plan = optimus.plan(zoo.build("bloom"))
    (claim,) = {c.measured for c in plan.claims if c.replacement == "bloom.attention.scores"}
    assert "x at 512" in claim
    assert claim in str(plan)
    refused = {name: r.reason for _, name, r in optimus.plan(zoo.build("bros")).refusals}
    assert re.match(r"does not pay: measured \d+\.\d+x at \d+", refused["bros.attention.scores"])
    cuda = Backend("cuda", "cuda")
    named = {
        name: r.reason for _, name, r in optimus.plan(zoo.build("bloom"), backend=cuda).refusals
    }
    assert named["bloom.attention.scores"] == "not measured on cuda/float32"


def test_short_calls_take_the_stock_path(capable):
    """After the check, which sees the swap, calls below the measured length are stock, bitwise."""
    stock = zoo.build("bloom")
    mine = sweep.transformed(stock, optimus.Recipe("one", (("bloom.attention.scores",),)), capable)
    given = zoo.inputs(stock)
    expected, _ = sweep.watched(stock, given)
    found, seen = sweep.watched(mine, given)
    assert seen.fused == 0
    assert torch.equal(found.logits, expected.logits)


def test_another_processor_has_figures_of_its_own(capable):
    """bf16 on a processor that computes in it is not what it is where bf16 is emulated."""
    narrow = dataclasses.replace(X86, dtype=torch.bfloat16)
    native = dataclasses.replace(narrow, backend=capable)
    assert (costs.key(X86), costs.key(narrow)) == ("x86/float32", "x86/bfloat16")
    assert costs.key(native) == "x86/native-bfloat16"
    model = case("llama", attention="eager", dtype=torch.bfloat16).build()
    refused = [r.reason for _, _, r in optimus.plan(model, backend=capable).refusals]
    assert any(reason.startswith("does not pay: measured 0.44x at 64") for reason in refused)
