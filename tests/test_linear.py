"""The packed linear layer: lossless, lent when asked for, and never a second copy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimus
from optimus.core.canonical import Placeholder
from optimus.core.errors import SurgeryError
from optimus.ops.linear import PackedWeight
from optimus.replacements._linear import SMALLEST, Packed, Packing

DTYPES = (torch.float32, torch.bfloat16)


def _transformed(model: nn.Module, backend: Any, width: int) -> nn.Module:
    sample = {"input": torch.randn(3, width, dtype=next(model.parameters()).dtype)}
    return optimus.transform(model.eval(), backend=backend, sample=sample)


def _linear(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(257, 300, bias=bias)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (33, 17), (256, 256), (300, 257), (3072, 768)])
def test_packing_is_lossless(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Any shape comes back with its bits, also those of NaN, infinity and signed zero."""
    weight = torch.randn(shape).to(dtype)
    flat = weight.view(-1)
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42])[: flat.numel()].to(dtype)
    flat[: special.numel()] = special
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    assert torch.equal(PackedWeight(weight).dense().view(bits), weight.view(bits))


@pytest.mark.parametrize("rows", [1, 2, 64, 130])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_product(capable: Any, dtype: torch.dtype, rows: int, *, bias: bool) -> None:
    """The packed product agrees with the stock one, with leading dimensions too."""
    model = _linear(dtype, bias=bias)
    x = torch.randn(2, rows, 257).to(dtype)
    with torch.no_grad():
        stock = model(x)
        mine = _transformed(model, capable, 257)(x)
    assert isinstance(model[0], Packed)
    assert mine.shape == stock.shape
    assert (mine - stock).norm() / stock.norm() < (1e-6 if dtype is torch.float32 else 1e-2)


def test_no_second_copy(capable: Any) -> None:
    """While packed, the table holds one element where the weight was, and says the right shape."""
    model = _transformed(_linear(), capable, 257)
    stand_in = model[0]._parameters["weight"]
    assert isinstance(stand_in, Placeholder)
    assert stand_in.untyped_storage().nbytes() == 4
    assert stand_in.shape == (300, 257)
    assert stand_in.isnan().all()


def test_weight_reads_as_stock_and_is_packed_again(capable: Any) -> None:
    """Reading lends the weight; the next call packs it once nobody holds it."""
    model = _linear()
    stock = model[0].weight.detach().clone()
    layer: Any = _transformed(model, capable, 257)[0]
    assert torch.equal(layer.weight, stock)
    assert layer._packed is None
    model(torch.randn(2, 257))
    assert layer._packed is not None


def test_a_write_is_never_lost(capable: Any) -> None:
    """Whoever holds the lent weight may write into it, before or after later calls."""
    model = _transformed(_linear(), capable, 257)
    x = torch.randn(2, 257)
    held = model[0].weight
    with torch.no_grad():
        model(x)
        held.zero_()
        assert torch.equal(model(x), model[0].bias.expand(2, 300))
        del held
        model[0].weight.fill_(1.0)
        ones = x.sum(1, keepdim=True) + model[0].bias
        torch.testing.assert_close(model(x), ones, rtol=1e-4, atol=1e-4)
    optimus.reverse(model)
    assert torch.equal(model[0].weight, torch.ones(300, 257))


def test_an_assigned_weight_is_used(capable: Any) -> None:
    """``layer.weight = ...`` replaces the packed one."""
    model = _transformed(_linear(bias=False), capable, 257)
    model[0].weight = nn.Parameter(torch.zeros(300, 257))
    with torch.no_grad():
        assert torch.equal(model(torch.randn(2, 257)), torch.zeros(2, 300))


def _gradient(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("bias", [True, False])
def test_gradient_flows_through(capable: Any, *, bias: bool) -> None:
    """The input's gradient, which an adapter below needs, is the stock one; so is the bias's."""
    model, x = _linear(bias=bias), torch.randn(5, 257)
    stock = _gradient(model, x)
    stock_bias = model[0].bias.grad if bias else None
    model.zero_grad()
    _transformed(model, capable, 257)
    torch.testing.assert_close(_gradient(model, x), stock)
    if bias:
        torch.testing.assert_close(model[0].bias.grad, stock_bias)


def test_training_is_refused(capable: Any) -> None:
    """In training mode the weight would get no gradient, and the layer says so."""
    model = _transformed(_linear(), capable, 257).train()
    with pytest.raises(SurgeryError, match="packed for inference"):
        model(torch.randn(2, 257))
    for parameter in model.parameters():
        parameter.requires_grad = False
    assert model(torch.randn(2, 257)).shape == (2, 300)


def test_inference_only(capable: Any) -> None:
    """A plan for training leaves linear layers alone and gives the reason."""
    plan = optimus.plan(_linear(), backend=capable, mode="training")
    assert plan.claims == ()
    assert "training" in plan.refusals[0][2].reason


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.to(torch.float64),
        lambda m: m.half(),
        lambda m: m.to("meta"),
        lambda m: m.bfloat16(),
    ],
    ids=["double", "half", "meta", "bfloat16"],
)
def test_moving_and_casting(capable: Any, convert: Any) -> None:
    """``model.to(...)`` does to a packed layer what it does to a stock one."""
    model, stock = _linear(), _linear()
    _transformed(model, capable, 257)
    convert(stock)
    convert(model)
    weight, wanted = model[0].weight, stock[0].weight
    assert (weight.dtype, weight.device) == (wanted.dtype, wanted.device)
    assert weight.is_meta or torch.equal(weight, wanted)
    if not weight.is_meta:
        x = torch.randn(2, 257).to(weight.dtype)
        torch.testing.assert_close(model(x), stock(x), rtol=2e-2, atol=2e-2)


def test_autocast_and_other_dtypes_are_stock(capable: Any) -> None:
    """Under autocast the output has autocast's dtype; a wrong input dtype fails as stock does."""
    model = _transformed(_linear(), capable, 257)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.randn(2, 257)).dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.randn(2, 257, dtype=torch.float64))


def test_empty_batch(capable: Any) -> None:
    """No rows in, no rows out."""
    model = _transformed(_linear(), capable, 257)
    assert model(torch.empty(0, 257)).shape == (0, 300)


def test_constant_readers_end_up_dense(capable: Any) -> None:
    """A model that reads its weight at every call is not packed again for ever."""
    model = _transformed(_linear(), capable, 257)
    layer: Any = model[0]
    for _ in range(10):
        assert layer.weight.dtype is torch.float32
        model(torch.randn(2, 257))
    assert layer._packed is None


def test_conv1d(capable: Any) -> None:
    """GPT-2's layer stores ``[in, out]``, and gets it back so."""
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(300, 257))
    stock = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 3, 257)
    with torch.no_grad():
        before = model(x)
        optimus.transform(model.eval(), backend=capable, sample={"input": x})
        torch.testing.assert_close(model(x), before)
    assert all(torch.equal(v, stock[k]) for k, v in model.state_dict().items())
    optimus.reverse(model)
    assert model[0].weight.is_contiguous()
    assert torch.equal(model[0].weight, stock["0.weight"])


def test_readers_of_weights_are_left_alone(capable: Any) -> None:
    """torch's own attention and encoder layers read ``weight`` themselves."""
    model = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
    plan = optimus.plan(model, backend=capable)
    assert plan.claims == ()
    assert any("reads the weight itself" in refusal.reason for _, _, refusal in plan.refusals)


def test_small_and_tied_layers_are_left_alone(capable: Any) -> None:
    """Below the size that pays, and where a new layout would untie."""
    small = nn.Sequential(nn.Linear(8, SMALLEST // 8 - 1))
    tied = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    tied[1].weight = tied[0].weight
    reasons = [
        refusal.reason
        for model in (small, tied)
        for _, name, refusal in optimus.plan(model, backend=capable).refusals
        if name == "any.linear.packed"
    ]
    too_small = "too small to pay: fewer than 65,536 weights"
    assert reasons == [too_small, "tied to 1.weight", "tied to 0.weight"]


def test_an_interrupted_fold_is_undone() -> None:
    """Between the two writes of a fold, unfold still finds the weight."""
    layer = nn.Linear(256, 256)
    stock = layer.weight
    bits = stock.detach().clone()
    packing = Packing(transposed=False)
    vars(layer).update(_packed=PackedWeight(stock), _lent=0)
    packing.unfold(layer)
    assert layer.weight is stock
    assert torch.equal(layer.weight, bits)
    assert "_packed" not in vars(layer)


def test_export_is_refused_by_name(capable: Any) -> None:
    """A graph that leaves this machine cannot hold this machine's layout."""
    model = _transformed(_linear(), capable, 257)
    with pytest.raises(Exception, match="cannot be exported"):
        torch.export.export(model, (torch.randn(2, 257),))


def test_inductor(capable: Any) -> None:
    """Compiled for real, whole, and right, also after the weight was lent."""
    model, x = _linear(), torch.randn(2, 257)
    with torch.no_grad():
        stock = model(x)
        _transformed(model, capable, 257)
        compiled = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(compiled(x), stock)
        held = model[0].weight
        torch.testing.assert_close(compiled(x), stock)
        assert held is model[0].weight


def test_prefix_by_position(capable: Any) -> None:
    """torch's old way to call ``state_dict`` gets the stock values too."""
    model = _linear()
    stock = model[0].weight.detach().clone()
    layer = _transformed(model, capable, 257)[0]
    with pytest.warns(FutureWarning, match="Positional args"):
        state = layer.state_dict({}, "head.")
    assert torch.equal(state["head.weight"], stock)
