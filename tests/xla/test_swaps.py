"""What is swapped on XLA computes the same there, and comes back bit for bit."""

import copy

import pytest
import torch
import torch_xla
from torch_xla.debug import metrics

import optimus
from optimus.core.errors import BackendUnavailableError
from optimus.core.planner import JOURNAL
from optimus.core.verify import reference, verify

ROTARY = ("deepseek_v2", "llama4_text")


def _bits(model):
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def _error(found, expected):
    return float((found.cpu() - expected).norm() / expected.norm())


def _ids(rows=2, length=16):
    return torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("recipe", ["auto", "int8"])
def test_return(wide, moved, recipe):
    """Transform and reverse on XLA: the same classes, tables and bits, on the same device."""
    model = moved(wide)
    before = _bits(model)
    classes = [type(module) for module in model.modules()]
    tables = [list(vars(module)) for module in model.modules()]
    optimus.transform(model, recipe)
    assert vars(model)[JOURNAL].verification.startswith("verified")
    assert _bits(model).keys() == before.keys()
    optimus.reverse(model)
    assert [type(module) for module in model.modules()] == classes
    assert [list(vars(module)) for module in model.modules()] == tables
    assert all(torch.equal(value, before[name]) for name, value in _bits(model).items())
    assert {parameter.device.type for parameter in model.parameters()} == {"xla"}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_names_of_the_backend(stock, moved):
    """``tpu`` is XLA, and a model that is not there is told to move."""
    assert optimus.plan(moved(stock), backend="tpu").context.backend.name == "xla"
    with pytest.raises(BackendUnavailableError, match="Move it there first"):
        optimus.plan(stock, backend="tpu")


def test_outputs_are_compared_as_one_graph(stock, moved, compiled):
    """The check compiles the model, and not each comparison of numbers."""
    model = moved(stock)
    before = reference(model)
    first = compiled()
    assert verify(model, before).ok
    assert compiled() - first <= 1


@torch.no_grad()
def test_eight_bits(wide, moved):
    """Weights of 8 bits are what the compiled program reads, and the answers are near."""
    model, ids = moved(wide), _ids()
    expected = wide(ids).logits
    optimus.transform(model, "int8")
    logits = model(ids.to("xla")).logits
    program = torch_xla._XLAC._get_xla_tensors_hlo([logits])
    assert "s8[512,256]" in program
    assert 0 < _error(logits, expected) <= 0.05


@torch.no_grad()
def test_eight_bits_of_bf16(wide, moved):
    """In bf16, too; a copy computes alone, and the originals wait on the host."""
    model, ids = moved(copy.deepcopy(wide).to(torch.bfloat16)), _ids().to("xla")
    expected = model(ids).logits.float().cpu()
    optimus.transform(model, "int8")
    twin = copy.deepcopy(model)
    kept = {one.value.device.type for one in vars(model)[JOURNAL].rounded.values()}
    optimus.reverse(model)
    assert _error(twin(ids).logits.float(), expected) <= 0.05
    assert kept == {"cpu"}


@pytest.mark.parametrize("model_type", ROTARY)
@torch.no_grad()
def test_rotary_is_real(zoo, model_type):
    """No complex number in the program, and nothing sent back to the CPU for it."""
    stock, ids = zoo.build(model_type).eval(), _ids()
    # torch_xla has no histogram of whole numbers, which transformers' default for experts asks for.
    stock.set_experts_implementation("batched_mm")
    expected = stock(ids)[0]
    model = stock.to("xla")
    assert "c64" in torch_xla._XLAC._get_xla_tensors_hlo([model(ids.to("xla"))[0]])
    optimus.transform(model)
    metrics.clear_all()
    found = model(ids.to("xla"))[0]
    assert "c64" not in torch_xla._XLAC._get_xla_tensors_hlo([found])
    assert [name for name in metrics.counter_names() if name.startswith("aten::")] == []
    assert _error(found, expected) <= 1e-6
