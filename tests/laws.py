"""The eleven laws that every replacement keeps, one function each.

A law takes a case (a model and a recipe) and a backend, builds what it needs and asserts. A new
architecture is held to all of them by being registered.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from models import Call, Case, Stranger, batch, calls, masks, nudged, overriding
from snapshots import distance, identical, snapshot, values
from torch import Tensor, nn
from uses import assert_same_tokens, bump, compiled, learn, watch

import optimus
from optimus.core.errors import NothingToDoError, PlanError
from optimus.core.paths import ties
from optimus.core.registry import Registry
from optimus.core.verify import CLOSE, LOSSY

Backend, Plan = optimus.Backend, optimus.Plan
# What rounds weights and leaves the rest of the model in its dtype.
ROUNDING = ("int8", "int8-dynamic", "int4")
# Roundings of the weights that drift_of_host tries.
NUDGES = 8


def tolerance(case: Case) -> float:
    """How far the answers of the transformed model may be from the stock ones."""
    return LOSSY.get(case.recipe, CLOSE[case.dtype])


def planned(case: Case, backend: Backend, model: nn.Module) -> Plan | None:
    """The case's plan; None where it says that there is nothing to round."""
    try:
        return optimus.plan(model, case.recipe, backend=backend)
    except NothingToDoError:
        assert case.recipe in ROUNDING
        return None


def changed(
    case: Case, backend: Backend, model: nn.Module | None = None, **options: Any
) -> nn.Module:
    """The case's model, or the one given, transformed and not checked."""
    model = case.build() if model is None else model
    return optimus.transform(model, case.recipe, backend=backend, check=False, **options)


def answer(model: nn.Module, kind: str = "right") -> Any:
    """What the model answers to a batch of that kind."""
    return Call(kind, (), batch(model, kind), None)(model)


def assert_same(case: Case, mine: nn.Module, stock: nn.Module, within: float | None = None) -> None:
    """Both answer a ragged and a full batch alike."""
    for kind in ("right", "ones"):
        mask = None if case.is_plain else masks()[kind]
        apart = distance(answer(mine, kind), answer(stock, kind), mask)
        assert apart <= (tolerance(case) if within is None else within), kind


def silence(case: Case, backend: Backend) -> None:
    """Law 1: a plan changes nothing, and what optimus does not know it leaves alone."""
    model = case.build()
    before = snapshot(model)
    optimus.plan(model, case.recipe, backend=backend)
    assert snapshot(model) == before
    plan = planned(case, backend, Stranger())
    assert plan is None or not plan.claims
    impostor = case.build()
    for module in impostor.modules():
        module.__class__ = overriding(type(module))
    refused = planned(case, backend, impostor)
    if refused is not None:
        assert not refused.claims
        passes = [one.name for one in Registry.installed().passes]
        left = [why.reason for _, name, why in refused.refusals if name not in passes]
        assert all("overrides the forward" in reason for reason in left)


def equivalence(case: Case, backend: Backend) -> None:
    """Law 2: the same answers to every kind of batch and with every option."""
    mine = changed(case, backend)
    far = {}
    for call, expected in stock_answers(case.architecture, case.head, case.attention, case.dtype):
        apart = distance(call(mine), expected, call.mask)
        if not apart <= tolerance(case) and not apart <= 2 * drift_of_host(case, call):
            far[call.label] = apart
    assert not far, far
    if case.recipe == "auto" and case.head.endswith("CausalLM"):
        assert_same_tokens(mine, case.build())


@functools.cache
def stock_answers(*choices: Any) -> list[tuple[Call, Any]]:
    """Every call and what the stock model answers to it; the same for all recipes."""
    architecture, head, attention, dtype = choices
    stock = Case(architecture, head, attention, dtype=dtype).build()
    return [(call, call(stock)) for call in calls(stock)]


def drift_of_host(case: Case, call: Call) -> float:
    """How far the host's own answer moves when its weights are rounded once more: a lone logit may
    cancel, and then no two orders of the same sums agree on it."""
    if case.recipe == "bf16":
        return distance(call(case.build().to(torch.bfloat16)), call(case.build()), call.mask)
    if case.recipe != "auto":
        return 0.0
    stock = call(case.build())
    moved = (call(nudged(case.build(), seed)) for seed in range(NUDGES))
    return max(distance(answer, stock, call.mask) for answer in moved)


def padding_is_zero(case: Case, backend: Backend) -> None:
    """Law 2, of unpadded encoders: there is nothing where there is no token."""
    mine = changed(case, backend)
    for kind in ("right", "hole"):
        mask = masks()[kind]
        output = mine(**batch(mine, kind), output_hidden_states=True)
        states = (output.last_hidden_state, *output.hidden_states)
        assert [int(state[mask == 0].count_nonzero()) for state in states] == [0] * len(states)


def keys(case: Case, backend: Backend) -> None:
    """Law 3: a checkpoint of the transformed model is the stock one, order and bits."""
    stock, mine = case.build(), changed(case, backend)
    assert values(mine.state_dict()) == values(stock.state_dict())
    assert mine.state_dict()._metadata == stock.state_dict()._metadata
    prefixed = mine.state_dict(prefix="inner.", keep_vars=True)
    assert values(prefixed) == values(stock.state_dict(prefix="inner."))
    assert shared(mine.state_dict()) == shared(stock.state_dict())
    answer(mine)
    assert values(mine.state_dict()) == values(stock.state_dict())
    if case.recipe != "bf16":
        assert shapes(mine) == shapes(stock)
        parts = zip(mine.named_children(), stock.named_children(), strict=True)
        assert all(values(a.state_dict()) == values(b.state_dict()) for (_, a), (_, b) in parts)


def shared(state: dict[str, Tensor]) -> list[list[str]]:
    """Which keys are views of one storage: savers read ties from that."""
    groups: dict[int, list[str]] = {}
    for key, tensor in state.items():
        groups.setdefault(tensor.data_ptr(), []).append(key)
    return [group for group in groups.values() if len(group) > 1]


def shapes(model: nn.Module) -> list[tuple[Any, ...]]:
    """The parameter table as optimizers and counters read it."""
    return [(k, p.shape, p.dtype, p.requires_grad) for k, p in model.named_parameters()]


def loading(case: Case, backend: Backend) -> None:
    """Law 4: a stock checkpoint loads strictly, is effective at once and survives the reverse."""
    other = case.build(seed=1)
    for assign in (False, True):
        mine = changed(case, backend)
        given = copy.deepcopy(other.state_dict())
        mine.load_state_dict(given, strict=True, assign=assign)
        assert values(mine.state_dict()) == values(other.state_dict())
        assert_same(case, mine, other)
        optimus.reverse(mine)
        assert values(mine.state_dict()) == values(other.state_dict())
        assert_same(case, mine, other, within=0.0)


def returning(case: Case, backend: Backend) -> None:
    """Law 5: after the reverse everything is as it was, bit for bit, and so are the answers."""
    model = case.build()
    every = list(calls(model))[::2]
    stock = [call(model) for call in every]
    before = snapshot(model)
    sample = batch(model) if case.is_plain else None
    optimus.transform(model, case.recipe, backend=backend, sample=sample)
    for call in every:
        call(model)
    assert optimus.reverse(model) is model
    assert snapshot(model) == before
    again = [call(model) for call in every[::2]]
    assert all(identical(mine, was) for mine, was in zip(again, stock[::2], strict=True))
    assert not optimus.is_transformed(model)


def training(case: Case, backend: Backend) -> None:
    """Law 6: what is written into weights while transformed is effective, and is not lost."""
    stock, mine = case.build(), changed(case, backend)
    answer(mine)
    for model in (stock, mine):
        bump(model)
    assert_same(case, mine, stock)
    written = values(mine.state_dict())
    optimus.reverse(mine)
    assert values(mine.state_dict()) == written
    assert_same(case, mine, stock)
    if case.recipe in LOSSY:
        return
    assert written == values(stock.state_dict())
    taught = changed(case, backend, mode="training")
    stock = case.build()
    held = [id(p) for p in taught.parameters()]
    for model in (stock, taught):
        learn(model)
    learned = values(taught.state_dict())
    optimus.reverse(taught)
    assert values(taught.state_dict()) == learned
    assert [id(p) for p in taught.parameters()] == held
    assert_same(case, taught, stock)


def idempotence(case: Case, backend: Backend) -> None:
    """Law 7: the same plan again is a no-op, another is an error, and so is a second reverse."""
    model = case.build()
    before = snapshot(model)
    for _ in range(2):
        plan = optimus.plan(model, case.recipe, backend=backend)
        changed(case, backend, model)
        during = snapshot(model)
        assert changed(case, backend, model) is model
        assert optimus.apply(model, plan) is model
        for other, options in another(case, backend):
            with pytest.raises(PlanError, match=f"already transformed.*{case.recipe}.*{other}"):
                optimus.transform(model, **options)
        assert snapshot(model) == during
        optimus.reverse(model)
        with pytest.raises(PlanError, match="not transformed"):
            optimus.reverse(model)
        assert snapshot(model) == before


def another(case: Case, backend: Backend) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests that differ from the case's in one respect, and the word that says so."""
    recipe = "bf16" if case.recipe == "auto" else "auto"
    arm = Backend("arm", "cpu", "", backend.features)
    yield recipe, {"recipe": recipe, "backend": backend}
    yield "arm", {"recipe": case.recipe, "backend": arm}
    yield "training", {"recipe": case.recipe, "backend": backend, "mode": "training"}


def independence(case: Case, backend: Backend) -> None:
    """Law 8: a copy of a transformed model computes, is written to and is reversed alone."""
    model, stock = changed(case, backend), case.build()
    answer(model)
    twin = copy.deepcopy(model)
    bump(model)
    assert_same(case, twin, stock)
    assert values(twin.state_dict()) == values(stock.state_dict())
    optimus.reverse(copy.deepcopy(twin))
    assert optimus.is_transformed(twin)
    optimus.reverse(twin)
    assert values(twin.state_dict()) == values(stock.state_dict())
    assert_same(case, twin, stock, within=0.0)
    assert optimus.is_transformed(model)
    optimus.reverse(model)
    assert classes(model) == classes(stock)


def neighbours(case: Case, backend: Backend) -> None:
    """Law 8: models that share the config object, or the very parameters, notice nothing."""
    model, lodger = case.build(), case.build()
    pairs = zip(lodger.modules(), model.modules(), strict=True)
    for mine, theirs in pairs:
        mine._parameters.update(theirs._parameters)
    heir = case.build() if case.is_plain else type(model)(model.config).eval()
    before = snapshot(heir), snapshot(lodger), answer(heir), answer(lodger)
    changed(case, backend, model)
    answer(model)
    for _ in range(2):
        assert snapshot(heir) == before[0]
        assert snapshot(lodger) == before[1]
        assert identical(answer(heir), before[2])
        assert identical(answer(lodger), before[3])
        if optimus.is_transformed(model):
            optimus.reverse(model)


def classes(model: nn.Module) -> list[type]:
    """The class of every module, in order."""
    return [type(module) for module in model.modules()]


def company(case: Case, backend: Backend) -> None:
    """Law 9: hooks on every module see what they see on the stock model, now and afterwards."""
    stock, mine = case.build(), case.build()
    seen, seen_of_stock = watch(mine), watch(stock)
    answer(stock)
    for step in (lambda m: changed(case, backend, m), optimus.reverse):
        tables = hooks(mine)
        step(mine)
        assert hooks(mine) == tables
        answer(mine)
        assert seen == seen_of_stock
        seen.clear()
    late = changed(case, backend)
    seen = watch(late)
    answer(late)
    assert seen == seen_of_stock


def hooks(model: nn.Module) -> list[Any]:
    """The hook tables of every module."""
    return [part["hooks"] for part in snapshot(model).values()]


class Counting(ModelHook):
    """How often accelerate called."""

    fired = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Count, and pass the arguments on."""
        self.fired += 1
        return args, kwargs


def accelerate_hooks(case: Case, backend: Backend) -> None:
    """Law 9: accelerate's hooks, in all six orders of hook, transform, unhook and reverse."""
    stock = case.build()
    expected, mask = answer(stock), None if case.is_plain else masks()["right"]
    without = ("forward", "_hf_hook", "_old_forward")
    orders = itertools.permutations(("hook", "transform", "unhook", "reverse"))
    for order in orders:
        if order.index("hook") > order.index("unhook"):
            continue
        if order.index("transform") > order.index("reverse"):
            continue
        model, hook, attached = case.build(), Counting(), False
        before = snapshot(model, without=without)
        for step in order:
            attached = {"hook": True, "unhook": False}.get(step, attached)
            take(step, case, backend, model, hook)
            hook.fired = 0
            assert distance(answer(model), expected, mask) <= tolerance(case), (order, step)
            assert (hook.fired >= len(list(model.children()))) == attached, (order, step)
        assert snapshot(model, without=without) == before, order


def take(step: str, case: Case, backend: Backend, model: nn.Module, hook: ModelHook) -> None:
    """One step of ``accelerate_hooks``."""
    if step == "hook":
        for module in model.modules():
            add_hook_to_module(module, hook)
    elif step == "unhook":
        remove_hook_from_module(model, recurse=True)
    elif step == "transform":
        changed(case, backend, model)
    else:
        optimus.reverse(model)


def tying(case: Case, backend: Backend) -> None:
    """Law 10: what was one parameter stays one, also for who writes into it."""
    stock = tied(case)
    mine = copy.deepcopy(stock)
    before = ties(mine)
    changed(case, backend, mine)
    assert ties(mine) == before
    for model in (stock, mine):
        bump(model)
        getattr(model, "tie_weights", model.eval)()
    assert ties(mine) == before
    assert_same(case, mine, stock)
    optimus.reverse(mine)
    assert ties(mine) == before
    if case.recipe == "auto":
        assert values(mine.state_dict()) == values(stock.state_dict())


def tied(case: Case) -> nn.Module:
    """The case's model with its head tied to embeddings large enough to be packed."""
    if not case.is_plain:
        return case.build(vocab_size=300, tie_word_embeddings=True)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).eval()
    torch.nn.init.eye_(model[0].weight)
    model[2].load_state_dict(model[0].state_dict())
    model[2].weight = model[0].weight
    return model


def graph(case: Case, backend: Backend) -> None:
    """Law 11: compiled in no more graphs than the stock model, whole if it is, and right."""
    # One layer is traced like the next.
    fewer = {} if case.is_plain else {"num_hidden_layers": 1}
    stock, mine = case.build(**fewer), changed(case, backend, case.build(**fewer))
    frames, expected = compiled(stock)
    ours, answers = compiled(mine)
    assert ours <= frames
    mask = None if case.is_plain else masks()["right"]
    assert distance(answers, expected, mask) <= tolerance(case)
