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


def test_experts_with_gradients_and_biases(capable):
    """A transposed layout, biases and a gate of its own; and the input's gradient."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=256, intermediate_size=128, num_local_experts=4)
    config._experts_implementation = "grouped_mm"
    experts, given = GptOssExperts(config).eval(), routing()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, 0, 0.06)
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
