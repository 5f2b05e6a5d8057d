"""A kernel of attention, asked for by name: what runs, what is left, and what is refused.

The operators of CUDA are stood in for by a double that holds them to what torch documents of them,
and asked for their shapes on meta; nothing here has run on a GPU.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from models import batch, case
from snapshots import snapshot
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import optimus
from optimus.core.errors import BackendUnavailableError, NothingToDoError, PlanError
from optimus.measure.side import Task, _transform
from optimus.ops import chosen
from optimus.ops.chosen import KERNELS, MATH, Kernel, attend

pytestmark = pytest.mark.usefixtures("one_thread")
CUDA = optimus.Backend("cuda", "cuda")
FLASH_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
ON_CPU = ("flash", "math")
NEAR = {"rtol": 1e-4, "atol": 2e-5}
CASES = (("llama", "AutoModelForCausalLM"), ("gpt2", "AutoModelForCausalLM"), ("bert", "AutoModel"))


def build(model_type: str = "llama", head: str = "AutoModelForCausalLM", **changes: Any) -> Any:
    """A tiny model, of its own."""
    return case(model_type, head).build(num_hidden_layers=1, **changes)


def asked(model: nn.Module, attention: str, backend: optimus.Backend, **options: Any) -> Any:
    """Transformed and not checked."""
    options |= {"attention": attention, "backend": backend, "check": False}
    return optimus.transform(model, **options)


class Ran(TorchDispatchMode):
    """The names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def ran(model: nn.Module, kind: str = "left") -> list[str]:
    """What ran for a batch of that kind."""
    with torch.no_grad(), Ran() as watch:
        model(**batch(model, kind))
    return watch.names


def answer(model: nn.Module, kind: str) -> Tensor:
    """The first output, where there are words."""
    given = batch(model, kind)
    with torch.no_grad():
        out = model(**given)[0]
    return out if "attention_mask" not in given else out[given["attention_mask"].bool()]


@pytest.mark.parametrize("attention", ON_CPU)
def test_the_kernel_that_was_asked_for_runs_and_answers_as_stock(attention, capable):
    """Of decoders and encoders, padded on any side or not at all; and all of it comes back."""
    for model_type, head in CASES:
        stock, mine = (build(model_type, head) for _ in range(2))
        before = snapshot(mine)
        asked(mine, attention, capable)
        assert (FLASH_ON_CPU in ran(mine)) == (attention == "flash"), model_type
        assert not [n for n in ran(mine) if "flash" in n and attention == "math"]
        for kind in ("none", "ones", "right", "left", "hole", "empty-row", "single"):
            torch.testing.assert_close(answer(mine, kind), answer(stock, kind), **NEAR)
        optimus.reverse(mine)
        assert snapshot(mine) == before


@pytest.mark.parametrize("attention", ON_CPU)
def test_it_compiles_whole_and_its_operator_is_in_the_graph(attention, capable):
    """No context manager, no break: one node of one graph."""
    stock, mine = build(), asked(build(), attention, capable)
    seen: list[str] = []

    def spy(graph: Any, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(mine, backend=spy, fullgraph=True)(**batch(mine, "left"))[0]
    node = {"flash": FLASH_ON_CPU, "math": "_scaled_dot_product_attention_math"}[attention]
    assert [name for name in seen if node in name]
    assert not [name for name in seen if "sdp_kernel" in name or "enable_flash" in name]
    real = batch(stock, "left")["attention_mask"].bool()
    torch.testing.assert_close(out[real], answer(stock, "left"), **NEAR)


def test_other_models_notice_nothing(capable):
    """Nor do the flags of the process, which torch's own way of choosing sets."""
    flags = [getattr(torch.backends.cuda, f"{n}_sdp_enabled") for n in ("flash", "math", "cudnn")]
    before = [flag() for flag in flags]
    model = build()
    heir = type(model)(model.config).eval()
    asked(model, "math", capable)
    names = ran(heir)
    assert FLASH_ON_CPU in names
    assert FLASH_ON_CPU not in ran(model)
    assert [flag() for flag in flags] == before
    assert heir.config._attn_implementation == "sdpa"


def test_the_plan_is_data_and_says_what_is_left(capable):
    """It is JSON, it shows what the kernel does not take, and which swaps made way for it."""
    plan = optimus.plan(build(), attention="flash", backend=capable)
    assert optimus.Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["recipe"]["attention"] == "flash"
    assert [c.path for c in plan.claims if c.replacement == "any.kernel.flash"] == [""]
    assert "on cpu, torch chooses for dropout" in str(plan)
    assert "attention='flash' was asked for" in str(plan)
    assert not [c for c in plan.claims if ".attention" in c.replacement]
    usual = optimus.plan(build(), backend=capable)
    assert not [c for c in usual.claims if ".kernel." in c.replacement]
    recipe = optimus.Recipe("mine", (("*",),), attention="math")
    assert optimus.plan(build(), recipe, backend=capable).recipe == recipe


def test_what_cannot_be_had_is_refused_with_the_reason(capable):
    """By hardware, by dtype, by the kind of model, and by name."""
    with pytest.raises(BackendUnavailableError, match="not built for x86"):
        optimus.plan(build(), attention="cudnn", backend=capable)
    with pytest.raises(NothingToDoError, match="takes bfloat16, float16, and the model is float32"):
        optimus.plan(build(), attention="flash", backend=CUDA)
    eager = case("llama", "AutoModelForCausalLM", attention="eager").build()
    with pytest.raises(NothingToDoError, match="attention is eager"):
        optimus.plan(eager, attention="math", backend=capable)
    with pytest.raises(NothingToDoError, match="no module of the model is of its kind"):
        optimus.plan(nn.Linear(4, 4), attention="math", backend=capable)
    with pytest.raises(PlanError, match="unknown attention 'fast'; known are auto, flash"):
        optimus.plan(build(), attention="fast", backend=capable)
    mine = asked(build(), "math", capable)
    with pytest.raises(PlanError, match=r"attention math.*'auto, attention flash'"):
        asked(mine, "flash", capable)
    assert asked(mine, "math", capable) is mine


def test_an_old_gpu_is_refused(monkeypatch):
    """Here a double of one: the plan says what the kernel needs, and what there is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    model = build().half()
    with pytest.raises(BackendUnavailableError, match=r"needs compute capability 8\.0.*has 7\.5"):
        optimus.plan(model, attention="flash", backend=CUDA)
    assert optimus.plan(model, attention="efficient", backend=CUDA).claims
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert optimus.plan(model, attention="flash", backend=CUDA).claims


def test_a_call_that_the_kernel_does_not_take_is_the_hosts(capable, monkeypatch):
    """Whole, and with its mask: here a kernel that takes no masks, on a padded batch."""
    stock, alone = build(), optimus.Recipe("alone", (), attention="flash")
    mine = optimus.transform(build(), alone, backend=capable, check=False)
    narrow = Kernel(chosen._flash_on_cpu, masks=False)
    monkeypatch.setitem(KERNELS, ("cpu", "flash"), narrow)
    assert torch.equal(answer(mine, "left"), answer(stock, "left"))


def test_gradients_are_those_of_stock(capable):
    """In training, with dropout that the flash kernel leaves to the host."""
    for attention in ON_CPU:
        stock = build(attention_dropout=0.0)
        mine = asked(build(attention_dropout=0.0), attention, capable, mode="training")
        for model in (stock, mine):
            model.train()
            model(**batch(model, "right"))[0][:, 0].square().mean().backward()
        for ours, theirs in zip(mine.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    dropping = KERNELS["cpu", "flash"]
    assert not dropping.takes(*states(), None, 0.1)
    assert MATH.takes(*states(), None, 0.1)


def states(heads: int = 4, groups: int = 2, width: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of five tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, 5, width), (2, groups, 5, width), (2, groups, 5, width))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value


def mask() -> Tensor:
    """Of a ragged batch, one row of which sees nothing."""
    seen = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    seen[0, :, 2] = False
    return seen


class Double:
    """CUDA's operators as torch documents them: what they demand is demanded, and what they answer
    is computed by SDPA."""

    def __init__(self) -> None:
        self.called: list[str] = []
        for name in ("flash", "efficient", "cudnn"):
            operator = SimpleNamespace(default=getattr(self, name))
            setattr(self, f"_scaled_dot_product_{name}_attention", operator)

    def flash(
        self, q: Tensor, k: Tensor, v: Tensor, p: float, causal: bool, *, scale: float
    ) -> Any:
        """No mask, heads of whole words, keys of fewer heads as they are."""
        assert q.shape[-1] % 8 == k.shape[-1] % 8 == v.shape[-1] % 8 == 0
        return self._answer("flash", q, k, v, None, causal, scale)

    def efficient(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sums: bool, p: float,
        causal: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        """A bias of all heads, whose rows begin lines; keys of all heads."""
        assert q.shape[1] == k.shape[1] == v.shape[1]
        if bias is not None:
            assert bias.shape == (*q.shape[:3], k.shape[2])
            assert all(n % 16 == 0 for n in bias.stride()[:-1])
        return self._answer("efficient", q, k, v, bias, causal, scale)

    def cudnn(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any, **how: Any
    ) -> Any:
        """A bias of all heads; keys of all heads."""
        assert q.shape[1] == k.shape[1] == v.shape[1]
        assert bias is None or bias.shape == (*q.shape[:3], k.shape[2])
        return self._answer("cudnn", q, k, v, bias, rest[2], how["scale"])

    def _answer(
        self, name: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool,
        scale: float,
    ) -> Any:  # fmt: skip
        self.called.append(name)
        how = {"attn_mask": bias, "is_causal": causal, "scale": scale, "enable_gqa": True}
        return (F.scaled_dot_product_attention(q, k, v, **how),)


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_cudas_operators_are_given_what_they_demand(name, monkeypatch):
    """On a double: widths, shared keys, masks and scales, and the answer of SDPA."""
    double = Double()
    monkeypatch.setattr(chosen, "aten", double)
    kernel = KERNELS["cuda", name]
    # Flash fills odd widths up; the others leave them.
    query, key, value = states(width=12 if name == "flash" else 16)
    for given, causal in ((None, False), (None, True), (mask(), False), (mask().float(), False)):
        if given is not None and not kernel.masks:
            assert not kernel.takes(query.half(), key, value, given, 0.0)
            continue
        how = {"is_causal": causal, "scale": 0.3, "enable_gqa": True}
        expected = F.scaled_dot_product_attention(query, key, value, attn_mask=given, **how)
        found = attend(kernel, query, key, value, given, causal=causal, scale=0.3)
        torch.testing.assert_close(found, expected)
    assert set(double.called) == {name}


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_cudas_operators_take_these_arguments(name):
    """The true ones, on meta: their schemas and shapes are torch's own."""
    query, key, value = (one.half().to("meta") for one in states())
    given = mask().to("meta") if KERNELS["cuda", name].masks else None
    out = attend(KERNELS["cuda", name], query, key, value, given, causal=False, scale=None)
    assert out.shape == query.shape
    assert out.is_meta


def test_what_a_kernel_takes_is_told_by_shapes():
    """Dtypes, widths, masks that learn, and nothing at all."""
    flash, efficient, cudnn = (KERNELS["cuda", n] for n in ("flash", "efficient", "cudnn"))
    half = tuple(one.half() for one in states())
    wide = tuple(one.half() for one in states(width=264))
    odd = tuple(one.half() for one in states(width=12))
    assert all(kernel.takes(*half, None, 0.0) for kernel in (flash, efficient, cudnn))
    assert not any(kernel.takes(*wide, None, 0.0) for kernel in (flash, cudnn))
    assert [kernel.takes(*odd, None, 0.0) for kernel in (flash, efficient)] == [True, False]
    assert not flash.takes(*states(), None, 0.0)
    narrow = (half[0], half[1], half[2][..., :8])
    assert [kernel.takes(*narrow, None, 0.0) for kernel in (efficient, MATH)] == [False, True]
    learned = torch.zeros(1, 4, 5, 5, requires_grad=True)
    on_cpu = KERNELS["cpu", "flash"]
    assert [k.takes(*states(), learned, 0.0) for k in (on_cpu, MATH)] == [False, True]
    assert not on_cpu.takes(*(one[:, :, :0] for one in states()), None, 0.0)


@pytest.mark.parametrize("kernel", [MATH, KERNELS["cpu", "flash"]], ids=ON_CPU[::-1])
def test_masks_of_every_kind_are_kept(kernel):
    """Boolean or added, of two dimensions or four; rows that see nothing answer nothing."""
    query, key, value = states()
    for given in (mask(), mask()[1, 0], mask().float() - 1, mask().expand(2, 4, 5, 5)):
        expected = F.scaled_dot_product_attention(
            query, key, value, attn_mask=given, enable_gqa=True
        )
        found = attend(kernel, query, key, value, given, causal=False, scale=None)
        torch.testing.assert_close(found, expected)
    assert not attend(kernel, query, key, value, mask(), causal=False, scale=None)[0, :, 2].any()


def test_latent_attention_is_for_math_alone(capable):
    """Its values are narrower than its keys."""
    model = zoo.build("deepseek_v2")
    with pytest.raises(NothingToDoError, match="narrower than its keys"):
        optimus.plan(model, attention="flash", backend=capable)
    given = zoo.inputs(model, padding="left")
    with torch.no_grad():
        expected = model(**given)[0]
        asked(model, "math", capable)
        found = model(**given)[0]
    real = given["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-3, atol=1e-4)


def test_the_command_asks_for_it(tiny_bert, capsys):
    """``plan`` and each side of ``bench``."""
    from optimus.cli import main

    assert main(["plan", str(tiny_bert), "--attention", "math", "--json"]) == 0
    plan = optimus.Plan.from_json(capsys.readouterr().out)
    assert plan.recipe.attention == "math"
    task = Task(model="", texts=[], batch=1, length=1, recipe="auto", attention="math")
    model = build()
    _transform(model, task, batch(model))
    assert optimus.is_transformed(model)
    assert FLASH_ON_CPU not in ran(model)
