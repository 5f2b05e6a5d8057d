"""Every law on every row, and every model type there is. Slow: ``make test-all`` runs it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import support
import sweep
import torch
import zoo
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from laws import Counting, classes, hooks
from snapshots import defined, identical, snapshot, tensors, values
from sweep import CAPPED, CLOSE, Row
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from uses import bump, watch

import optimus
from optimus.core.backend import Mode
from optimus.core.errors import NothingToDoError
from optimus.core.paths import ties

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.usefixtures("one_thread", "quiet_and_measured"),
]

ROWS = sweep.rows()
TRAINED = [row for row in ROWS if Mode.TRAINING in row.replacement.modes and row.name not in CAPPED]
# The others ask for a function of the host's interface, which knows nothing of the row.
WRITTEN = [row for row in ROWS if row.name.endswith(".scores")]
TYPES = [t for t in zoo.model_types() if t not in zoo.NEEDS and t not in zoo.CANNOT]
# How many matches it finds depends on the last bit of bf16.
COUNTING = {"superglue.attention.scores"}
# Trains only with labels for every part: its gradients are taken in eval mode.
LABELLED = {"fastspeech2_conformer.attention.scores"}
GRADIENT, SMALL, FLOOR = 1e-4, 1e-6, 1e-4


@pytest.fixture
def quiet_and_measured():
    """Every row pays at every length, and what transformers warns about its models is its own."""
    with warnings.catch_warnings(), sweep.measured_everywhere():
        warnings.simplefilter("ignore")
        yield


def on(rows: list[Row]) -> Any:
    """Parametrise a test over rows."""
    return pytest.mark.parametrize("row", rows, ids=str)


def pair(row: Row, backend: optimus.Backend, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """The stock model, a transformed copy, and a ragged batch."""
    stock, given = sweep.warm(row)
    return stock, sweep.transformed(stock, row.recipe, backend, **options), given


def assert_same(mine: nn.Module, stock: nn.Module, given: dict[str, Any]) -> None:
    """Both answer alike."""
    expected = sweep.answer(stock, given)
    assert sweep.error(sweep.answer(mine, given), expected, stock, given) <= CLOSE


@on(ROWS)
def test_keys_and_loading(row: Row, capable):
    """The checkpoint is the stock one, and another stock one loads."""
    stock, mine, given = pair(row, capable)
    sweep.answer(mine, given)
    assert values(mine.state_dict()) == values(stock.state_dict())
    assert mine.state_dict()._metadata == stock.state_dict()._metadata
    other = copy.deepcopy(stock)
    bump(other)
    mine.load_state_dict(other.state_dict(), strict=True)
    assert_same(mine, other, given)
    optimus.reverse(mine)
    assert values(mine.state_dict()) == values(other.state_dict())


@on(ROWS)
def test_returning_and_idempotence(row: Row, capable):
    """Twice is once; then every class, table, flag and byte is back."""
    model, given = sweep.warm(row)
    before, twins = snapshot(model), ties(model)
    expected = sweep.answer(model, given)
    for _ in range(2):
        optimus.transform(model, row.recipe, backend=capable, check=False)
        during = snapshot(model)
        assert optimus.transform(model, row.recipe, backend=capable, check=False) is model
        sweep.answer(model, given)
        assert ties(model) == twins
        assert snapshot(model).keys() == during.keys()
        optimus.reverse(model)
        assert snapshot(model) == before
    assert identical(sweep.answer(model, given), expected)


@on(ROWS)
def test_independence(row: Row, capable):
    """A copy of a transformed model computes, is written to and is reversed alone."""
    stock, mine, given = pair(row, capable)
    sweep.answer(mine, given)
    twin = copy.deepcopy(mine)
    bump(mine)
    assert_same(twin, stock, given)
    optimus.reverse(twin)
    assert classes(twin) == classes(stock)
    assert identical(sweep.answer(twin, given), sweep.answer(stock, given))
    assert optimus.is_transformed(mine)


@on(ROWS)
def test_company(row: Row, capable):
    """Hooks on every module see what they see on the stock model, now and afterwards."""
    stock, given = sweep.warm(row)
    # Not two models: those share what transformers has one of for all, such as activations.
    mine = copy.deepcopy(stock)
    seen, seen_of_stock = watch(mine), watch(stock)
    sweep.answer(stock, given)
    for step in ("transform", "reverse"):
        tables = hooks(mine)
        if step == "transform":
            optimus.transform(mine, row.recipe, backend=capable, check=False)
        else:
            optimus.reverse(mine)
        assert hooks(mine) == tables
        sweep.answer(mine, given)
        assert seen == seen_of_stock
        seen.clear()


@on(ROWS)
def test_accelerate_hooks(row: Row, capable):
    """accelerate's hooks come before or after, and go."""
    stock, given = sweep.warm(row)
    for first in ("hook", "transform"):
        mine, hook = copy.deepcopy(stock), Counting()
        if first == "transform":
            optimus.transform(mine, row.recipe, backend=capable, check=False)
        for module in mine.modules():
            add_hook_to_module(module, hook)
        if first == "hook":
            optimus.transform(mine, row.recipe, backend=capable, check=False)
        assert_same(mine, stock, given)
        assert hook.fired > 0
        remove_hook_from_module(mine, recurse=True)
        assert_same(mine, stock, given)
        optimus.reverse(mine)
        assert classes(mine) == classes(stock)


def gradients(model: nn.Module, given: dict[str, Any]) -> dict[str, Tensor]:
    """What one backward pass leaves on every parameter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        output = model(**given)
    mask = sweep.mask_of(given)
    learned = [defined(t, mask) for _, t in tensors(output) if t.requires_grad]
    finite = [t[torch.isfinite(t)] for t in learned]
    sum(t.float().pow(2).mean() for t in finite if t.numel()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@on(TRAINED)
def test_gradients(row: Row, capable):
    """Of every parameter, without dropout."""
    stock, given = sweep.warm(row, steady=True)
    mine = sweep.transformed(stock, row.recipe, capable, mode="training")
    for model in (stock, mine):
        model.train(mode=row.name not in LABELLED)
    theirs, ours = gradients(stock, given), gradients(mine, given)
    assert ours.keys() == theirs.keys()
    scale = max(float(g.norm()) for g in theirs.values())
    far = {k: float((ours[k] - g).norm()) for k, g in theirs.items()}
    allowed = {k: GRADIENT * float(g.norm()) + SMALL * scale for k, g in theirs.items()}
    assert {k: v / allowed[k] for k, v in far.items() if not v <= allowed[k]} == {}


def narrowed(given: dict[str, Any]) -> dict[str, Any]:
    """Float inputs in bf16."""
    return {
        k: v.bfloat16() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in given.items()
    }


@on([row for row in ROWS if not row.name.endswith(".fused") and row.name not in COUNTING])
def test_bf16(row: Row, capable):
    """At most twice as far from fp32 as the stock model in bf16; rows by the host refuse bf16."""
    wide, given = sweep.warm(row)
    stock = copy.deepcopy(wide).bfloat16()
    try:
        mine = sweep.transformed(stock, row.recipe, capable)
    except NothingToDoError as refusal:
        assert "half float rounds" in str(refusal)  # noqa: PT017 - most rows are not refused
        return
    exact, narrow = sweep.answer(wide, given), narrowed(given)
    try:
        theirs = away(sweep.answer(stock, narrow), exact, given)
    except RuntimeError:
        # Stock models that mix dtypes by hand do not run in bf16: there is nothing to compare.
        return
    assert away(sweep.answer(mine, narrow), exact, given) <= 2 * theirs + FLOOR


def away(narrow: Any, exact: Any, given: dict[str, Any]) -> float:
    """The largest relative error of any output at real positions."""
    found, mask, far = dict(tensors(narrow)), sweep.mask_of(given), 0.0
    for key, value in tensors(exact):
        a, b = defined(found[key], mask).float(), defined(value, mask).float()
        finite = torch.isfinite(a) & torch.isfinite(b)
        if float(b[finite].norm()):
            far = max(far, float((a - b)[finite].norm() / b[finite].norm()))
    return far


@on([row for row in ROWS if row.generates])
def test_generation(row: Row, capable):
    """Fifty greedy tokens, through every cache, are the same."""
    stock, mine, _ = pair(row, capable)
    encodes = stock.config.is_encoder_decoder
    given = row.inputs(stock, 3, "right" if encodes else "left")
    given.pop("decoder_input_ids", None)
    sizes = {"max_new_tokens": 50, "min_new_tokens": 50, "do_sample": False, "use_cache": True}
    tokens = [model.generate(**given, **sizes) for model in (stock, mine)]
    assert torch.equal(*tokens)


@on(WRITTEN)
def test_graphs(row: Row, capable):
    """Compiled in no more graphs than stock, and right."""
    stock, mine, given = pair(row, capable)
    frames, answers = [], []
    for model in (stock, mine):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        answers.append(sweep.answer(torch.compile(model, backend=counter), given))
        frames.append(counter.frame_count)
    assert frames[1] <= frames[0]
    assert sweep.error(answers[1], answers[0], stock, given) <= CLOSE


@pytest.mark.parametrize("model_type", TYPES)
def test_type(model_type: str):
    """Whatever rows apply: right, and softmax attention is on a kernel or refused with a reason."""
    found = support.classify(model_type)
    assert found.far <= CLOSE
    assert found.unexplained == frozenset()


def test_the_readme_has_the_table():
    """The support table is generated, so it cannot lag behind."""
    assert support.readme() == support.markdown(support.findings())
