"""Experts with fewer bits: their products, their plan, and how they are calibrated."""

from __future__ import annotations

import copy

import pytest
import torch
from models import EXPERTS, Case
from snapshots import distance, values
from torch import Tensor, nn
from uses import claims, rounded

import optimus
from optimus.ops import native
from optimus.ops.quantized import QuantizedWeight

pytestmark = pytest.mark.usefixtures("one_thread")
CAUSAL = "AutoModelForCausalLM"


def mixtral(recipe: str = "int4") -> Case:
    """The tiny mixture of experts."""
    return Case(EXPERTS, CAUSAL, recipe=recipe)


def routing() -> tuple[Tensor, Tensor, Tensor]:
    """Rows, of which none goes to expert 1."""
    rows = torch.randn(7, 256)
    chosen = torch.tensor([[0, 2], [2, 3], [3, 0], [0, 3], [2, 0], [3, 2], [0, 2]])
    return rows, chosen, torch.rand(7, 2)


@pytest.mark.parametrize("recipe", ["int8", "int8-dynamic", "int4"])
def test_experts(recipe, capable, monkeypatch):
    """Routed rows get the answers of the rounded weights, and other experts are not read."""
    model = mixtral(recipe).build()
    experts, given = model.model.layers[0].mlp.experts, routing()
    twin = copy.deepcopy(experts)
    rounded(model, capable, recipe)
    for bridge in experts.bridges:
        twin._parameters[bridge.key] = nn.Parameter(bridge.dense(experts))
    read: list[int] = []
    product = QuantizedWeight.matmul
    monkeypatch.setattr(
        QuantizedWeight,
        "matmul",
        lambda self, *given: read.append(id(self)) or product(self, *given),
    )
    with torch.no_grad():
        assert 0 < distance(experts(*given), twin(*given), None) < 2e-2
    codes = [bridge.state(experts).packed.experts for bridge in experts.bridges]
    assert read == [id(codes[i][e]) for i in (0, 1) for e in (0, 2, 3)]
    assert experts.gate_up_proj.shape == twin.gate_up_proj.shape


def gpt_oss() -> nn.Module:
    """Experts with a transposed layout, biases and a gate of their own."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=256, intermediate_size=128, num_local_experts=4)
    config._experts_implementation = "grouped_mm"
    experts = GptOssExperts(config).eval()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, 0, 0.06)
    return experts


class Named(nn.Module):
    """Experts whose arguments have names, as a sample needs."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, rows: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        return self.experts(rows, chosen, shares)


def test_experts_with_gradients_and_biases(capable):
    """The answer, and the input's gradient."""
    experts, given = gpt_oss(), routing()
    model = nn.ModuleDict({"experts": experts})
    stock = copy.deepcopy(experts)
    rounded(model, capable, "int8")
    answers = []
    for one in (experts, stock):
        rows = given[0].clone().requires_grad_()
        out = one(rows, *given[1:])
        out.square().sum().backward()
        answers.append((out.detach(), rows.grad))
    assert distance(answers[0], answers[1], None) < 3e-2
    optimus.reverse(model)
    assert values(model.state_dict()) == values(nn.ModuleDict({"experts": stock}).state_dict())


def test_moe_plan(capable):
    """Experts in 4 bits, the head in 8, and nothing of the routers."""
    found = claims(mixtral().build(vocab_size=300), capable, "int4")
    assert found["model.layers.1.mlp.experts"] == "int4"
    assert found["lm_head"] == "int8"
    assert not any(path.endswith("gate") for path in found)


def test_without_compiled_kernels(capable, monkeypatch):
    """The plan says of experts, too, that they are slow."""
    monkeypatch.setattr(native, "available", lambda: "not built")
    made = optimus.plan(mixtral().build(), "int8", backend=capable)
    said = {c.measured for c in made.claims if c.replacement == "any.experts.int8"}
    assert said == {"slower than fp32, by torch's own operators: the kernels are not built"}


@pytest.mark.parametrize("transposed", [False, True], ids=["upright", "transposed"])
def test_calibration(transposed, capable):
    """Both products know what comes in, the second by expert; who saw nothing is blind."""
    experts = gpt_oss() if transposed else mixtral().build().model.layers[0].mlp.experts
    torch.manual_seed(2)
    rows, chosen, shares = (
        torch.randn(160, 256),
        routing()[1].repeat(23, 1)[:160],
        torch.rand(160, 2),
    )
    rows[:, ::16] *= 30
    model = Named(experts)
    sample = {"rows": rows[:80], "chosen": chosen[:80], "shares": shares[:80]}
    blind = rounded(copy.deepcopy(model), capable, "int4")
    seeing = rounded(copy.deepcopy(model), capable, "int4", sample=sample)
    held = (rows[80:], chosen[80:], shares[80:])
    with torch.no_grad():
        errors = [distance(one(*held), model(*held), None) for one in (blind, seeing)]
    assert errors[1] < 0.9 * errors[0]
    up, down = (bridge.state(seeing.experts).worth for bridge in seeing.experts.bridges)
    assert (up.shape, down.shape) == ((256,), (4, 128))
    assert down[1].count_nonzero() == 0 < down[0].count_nonzero()
    dense = [one.experts.down_proj for one in (blind, seeing)]
    same = [torch.equal(*pair) for pair in zip(*dense, strict=True)]
    assert same == [False, True, False, False]
