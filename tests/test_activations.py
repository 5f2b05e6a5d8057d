"""The approximations of GELU in one pass, wherever models keep them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

import optimus

LIMIT = {torch.float32: 2e-7, torch.bfloat16: 2e-3, torch.float16: 3e-4}
NAMES = ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "quick_gelu")
ROWS = optimus.Recipe("activations", (("any.activation.*",),))


def _model(activation: nn.Module) -> nn.Module:
    return nn.Sequential(activation).eval()


def _transformed(activation: nn.Module) -> nn.Module:
    return optimus.transform(_model(activation), ROWS, check=False)


@pytest.mark.parametrize("name", [*NAMES, "torch"])
@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("count", [1, 37, 100_000])
def test_the_formula(name, dtype, count, capable, threads) -> None:
    """As the formula says in double precision, far out on both sides, too."""
    stock = nn.GELU(approximate="tanh") if name == "torch" else ACT2FN[name]
    x = (10 * torch.randn(count, generator=torch.Generator().manual_seed(0))).to(dtype)
    exact = stock(x.double())
    with torch.no_grad():
        found = _transformed(stock)(x)
    assert found.dtype is dtype
    assert float((found.double() - exact).norm() / exact.norm()) < LIMIT[dtype]


@pytest.mark.parametrize("name", NAMES)
def test_the_model_s_own_way(name, capable) -> None:
    """With gradients, and of numbers that do not lie side by side: bit for bit."""
    stock, mine = _model(ACT2FN[name]), _transformed(ACT2FN[name])
    x = torch.randn(6, 8)
    assert torch.equal(mine(x.requires_grad_()), stock(x))
    with torch.no_grad():
        assert torch.equal(mine(x.t()), stock(x.t()))
        assert mine(torch.tensor([torch.nan, 1.0])).isnan().tolist() == [True, False]


@pytest.mark.parametrize("name", ["gelu", "relu", "silu", "gelu_python_tanh"])
def test_others_are_left_alone(name, capable) -> None:
    """What torch is quicker at, what is another function, and a formula of somebody's own."""
    assert optimus.plan(_model(ACT2FN[name]), ROWS).claims == ()


def test_gelu_itself_is_refused_by_name(capable) -> None:
    """``nn.GELU`` is a target for its tanh form; the exact one is named in the reason."""
    plan = optimus.plan(_model(nn.GELU()), ROWS)
    assert plan.claims == ()
    assert any("'none', not 'tanh'" in refusal.reason for *_, refusal in plan.refusals)
