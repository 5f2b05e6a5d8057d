"""XLA's passes against a double of torch_xla: what is asked of it, and when.

The double keeps to the documented functions; the real one is run by ``make test-xla``.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import optimus
from optimus.core.backend import launch
from optimus.core.errors import BackendUnavailableError
from optimus.core.planner import JOURNAL
from optimus.generation import Buckets, compilations, warm_up, xla_cache
from optimus.generation.lazy import CACHE, compiled
from optimus.ops import spmd
from optimus.ops.spmd import Split
from optimus.passes.xla import Sharding

XLA = optimus.Backend("xla", "xla", features=frozenset({"int8-weights"}))
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass
class Double:
    """What torch_xla was told: launches, and shardings by the tensor's address."""

    launches: int = 0
    programs: int = 0
    spmd: bool = True
    devices: int = 2
    computed: bool = False
    folder: str = ""
    shardings: dict[int, tuple[str | None, ...]] = field(default_factory=dict)

    def sync(self) -> None:
        self.launches += 1

    def keep(self, folder: str) -> None:
        self.folder = folder

    def mark(self, tensor: Any, mesh: str, spec: tuple[str | None, ...]) -> None:
        assert tensor.ndim == len(spec)
        assert mesh == "mesh of model"
        self.shardings[tensor.data_ptr()] = spec

    def clear(self, tensor: Any) -> None:
        self.shardings.pop(tensor.data_ptr(), None)

    def spec(self, tensor: Any) -> str:
        found = self.shardings.get(tensor.data_ptr())
        return "{replicated}" if found is None else str(found)

    def modules(self) -> dict[str, Any]:
        """By name, as ``import`` looks them up."""
        inner = SimpleNamespace(
            _get_xla_sharding_spec=self.spec,
            _xla_computation_cache_is_initialized=lambda: self.computed,
        )
        runtime = _module(
            is_spmd=lambda: self.spmd,
            global_runtime_device_count=lambda: self.devices,
            initialize_cache=self.keep,
        )
        metrics = _module(counter_value=lambda name: self.programs or None)
        shards = _module(
            mark_sharding=self.mark,
            clear_sharding=self.clear,
            get_1d_mesh=lambda name: f"mesh of {name}",
        )
        debug, distributed = _module(metrics=metrics), _module(spmd=shards)
        parts = {"runtime": runtime, "debug": debug, "distributed": distributed}
        root = _module(__version__="2.9.0", sync=self.sync, _XLAC=inner, **parts)
        names = {"debug.metrics": metrics, "distributed.spmd": shards, **parts}
        return {"torch_xla": root, **{f"torch_xla.{name}": one for name, one in names.items()}}


def _module(**values: Any) -> ModuleType:
    made = ModuleType("double")
    vars(made).update(values)
    return made


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    """In the place of torch_xla; the CPU counts as its device."""
    made = Double()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name == "torch_xla" or known(name)
    )
    monkeypatch.setattr(spmd, "DEVICE", "cpu")
    return made


@pytest.fixture(scope="module")
def stock() -> LlamaForCausalLM:
    """Layers that are large enough to be rounded."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, **HEADS, vocab_size=128, eos_token_id=None, pad_token_id=0)
    return LlamaForCausalLM(config).eval()


def _tokens(model: Any, ids: torch.Tensor) -> torch.Tensor:
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    found: torch.Tensor = model.generate(ids, **given)
    return found


def test_only_a_lazy_device_is_launched(double: Double) -> None:
    """Nothing waits on a CPU, and nobody imports torch_xla for it."""
    launch(torch.device("cpu"))
    assert double.launches == 0
    launch(torch.device("xla"))
    assert double.launches == 1


def test_asked_for_without_it(stock: LlamaForCausalLM) -> None:
    """Where torch_xla is missing the machine has no XLA, and no programs are kept."""
    with pytest.raises(BackendUnavailableError, match="'tpu' is not on this machine"):
        optimus.plan(stock, backend="tpu")
    with pytest.raises(BackendUnavailableError, match="needs torch_xla"):
        xla_cache("programs")


def test_asked_for_elsewhere(double: Double, stock: LlamaForCausalLM) -> None:
    """With torch_xla the model has to be moved first."""
    with pytest.raises(BackendUnavailableError, match="Move it there first"):
        optimus.plan(stock, backend="tpu")


def test_layers_are_split(double: Double, stock: LlamaForCausalLM) -> None:
    """By transformers' plan, where whole heads fall to a device; cleared by the reverse."""
    model = optimus.transform(copy.deepcopy(stock), backend=XLA)
    layer = model.model.layers[0]
    rows, columns = (None, "model"), ("model", None)
    specs = [
        double.shardings.get(one.weight.data_ptr())
        for one in (
            layer.self_attn.q_proj,
            layer.self_attn.o_proj,
            layer.mlp.down_proj,
            model.lm_head,
        )
    ]
    assert specs == [columns, rows, rows, columns]
    assert vars(model)[JOURNAL].plan.passes == ("xla.sharding", "static.xla")
    optimus.reverse(model)
    assert double.shardings == {}
    double.devices = 4
    optimus.transform(model, backend=XLA)
    assert model.model.layers[0].self_attn.k_proj.weight.data_ptr() not in double.shardings
    assert model.model.layers[0].self_attn.q_proj.weight.data_ptr() in double.shardings


def test_a_bias_is_split_with_its_outputs(double: Double) -> None:
    """And whole where the inputs are split."""
    layer = torch.nn.Linear(4, 6)
    Split(1).fold(layer)
    assert list(double.shardings.values()) == [(None, "model")]
    Split(0).fold(layer)
    assert sorted(map(len, double.shardings.values())) == [1, 2]
    Split(0).unfold(layer)
    assert double.shardings == {}


def test_codes_are_split_as_the_weight_was(double: Double, stock: LlamaForCausalLM) -> None:
    """Rounded weights are sharded anew, with the scales of what is split by rows."""
    model = optimus.transform(copy.deepcopy(stock), "int8", backend=XLA)
    mlp = model.model.layers[1].mlp
    up, down = mlp.up_proj._packed, mlp.down_proj._packed
    assert double.shardings[up.codes.data_ptr()] == ("model", None)
    assert double.shardings[up.scale.data_ptr()] == ("model",)
    assert double.shardings[down.codes.data_ptr()] == (None, "model")
    assert down.scale.data_ptr() not in double.shardings
    optimus.reverse(model)
    expected = stock.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"spmd": False}, "SPMD is off"),
        ({"devices": 1}, "there is one device"),
        ({"devices": 3}, "no tp_plan of transformers splits its layers over 3 devices"),
    ],
)
def test_what_is_not_split(
    double: Double, stock: LlamaForCausalLM, state: dict[str, Any], reason: str
) -> None:
    """With the reason."""
    vars(double).update(state)
    context = optimus.plan(stock, backend=XLA).context
    refusal = Sharding().refuses(stock, context)
    assert refusal is not None
    assert reason in refusal.reason


def test_somebody_has_split_it(double: Double, stock: LlamaForCausalLM) -> None:
    """A sharding of the user's is his; and nothing is split for training."""
    double.mark(stock.model.embed_tokens.weight, "mesh of model", ("model", None))
    plan = optimus.plan(stock, backend=XLA)
    assert "xla.sharding" not in plan.passes
    refusal = Sharding().refuses(stock, plan.context)
    assert refusal is not None
    assert refusal.reason == "model.embed_tokens.weight is sharded already"
    assert "xla.sharding" not in optimus.plan(stock, backend=XLA, mode="training").passes


def test_one_launch_a_graph(double: Double, stock: LlamaForCausalLM) -> None:
    """What is pending goes first, so that the same graph is always the same program."""
    model = optimus.transform(copy.deepcopy(stock), backend=XLA)
    warm_up(model, Buckets(lengths=(8, 16), room=32))
    before, ids = double.launches, torch.arange(3, 15)[None]
    assert torch.equal(_tokens(model, ids), _tokens(stock, ids))
    # The slate is opened, a prefill and four decodes are two each, and the slate is given back.
    assert double.launches - before == 12
    assert compilations(model) == 0


def test_a_pass_is_done_once(double: Double, stock: LlamaForCausalLM) -> None:
    """Whoever names it, and then everything."""
    double.spmd = False
    assert optimus.plan(stock, "static", backend=XLA).passes == ("static.xla",)


def test_programs_are_counted(double: Double, stock: LlamaForCausalLM) -> None:
    """Those that XLA compiled during a graph, and no others."""
    model = optimus.transform(copy.deepcopy(stock), backend=XLA)
    warm_up(model, Buckets(lengths=(8,), room=16))
    double.programs = 5
    assert (compiled(), compilations(model)) == (5, 0)
    sync = double.sync

    def compiling() -> None:
        double.programs += 1
        sync()

    vars(sys.modules["torch_xla"])["sync"] = compiling
    _tokens(model, torch.arange(3, 9)[None])
    assert compilations(model) == double.programs - 5 > 0


def test_programs_are_kept(double: Double, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder for each torch_xla; once computed, it is too late for another."""
    monkeypatch.delenv(CACHE, raising=False)
    place = xla_cache(tmp_path)
    assert double.folder == str(place) == str(tmp_path / "torch_xla-2.9.0")
    assert place.is_dir()
    double.computed = True
    with pytest.raises(BackendUnavailableError, match="Call xla_cache before"):
        xla_cache(tmp_path / "other")
    monkeypatch.setenv(CACHE, double.folder)
    assert xla_cache(tmp_path) == place
