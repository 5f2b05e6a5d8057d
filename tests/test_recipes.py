"""Recipes with fewer bits: what they take, what they leave and why, mixtures, heads."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from models import PLAIN, batch, case
from snapshots import distance, snapshot, values
from torch import nn
from uses import claims, generated, rounded

import optimus
from optimus.core.canonical import Placeholder
from optimus.core.errors import (
    BackendUnavailableError,
    NothingToDoError,
    PlanError,
    SurgeryError,
)
from optimus.core.registry import Registry
from optimus.core.replacement import Fidelity
from optimus.core.verify import LOSSY
from optimus.ops import native
from optimus.ops.quantized import INT4, INT8, INT8_DYNAMIC, QuantizedWeight
from optimus.replacements._quantized import Quantized

pytestmark = pytest.mark.usefixtures("one_thread")
CAUSAL = "AutoModelForCausalLM"


def linear(width: int = 256, *, bias: bool = True) -> nn.Sequential:
    """One layer, large enough to round."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 512, bias=bias)).eval()


def spoiled(value: float) -> nn.Module:
    """A layer with one bad number."""
    model = linear()
    with torch.no_grad():
        model[0].weight[3, 5] = value
    return model


def typed() -> nn.Module:
    """What torchao makes: a parameter of a tensor subclass."""

    class AffineQuantizedTensor(nn.Parameter):
        """Codes of somebody else's."""

    model = linear()
    model[0].weight = AffineQuantizedTensor(model[0].weight.detach())
    return model


def offloaded() -> nn.Module:
    """What accelerate leaves of a layer that waits on disk."""
    model = linear().to("meta")
    vars(model[0])["_hf_hook"] = object()
    return model


def tied() -> nn.Module:
    """Two linear layers on one weight."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: linear(260), "groups of 32 do not divide 260 input features"),
        (lambda: nn.Sequential(nn.Linear(64, 64)), "too small to pay"),
        (lambda: spoiled(float("nan")), "NaN, infinity"),
        (lambda: spoiled(float("-inf")), "NaN, infinity"),
        (lambda: linear().double(), "weight is float64"),
        (typed, "weight is a AffineQuantizedTensor"),
        (offloaded, "weight is offloaded"),
        (tied, "tied to"),
        (lambda: nn.Sequential(nn.Conv1d(256, 512, 3)), "no module of the model is of its kind"),
    ],
)
def test_refusals(model, words, capable):
    """A recipe that can round nothing says why, and leaves the model as it was."""
    one = model()
    before = snapshot(one)
    with pytest.raises(NothingToDoError, match=words):
        optimus.plan(one, "int4", backend=capable)
    assert snapshot(one) == before


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "torchao"])
def test_already_quantized(method, capable):
    """A checkpoint that some quantizer made is named and not rounded again."""
    model = case("llama", CAUSAL).build()
    model.config.quantization_config = {"quant_method": method}
    with pytest.raises(NothingToDoError, match=rf"already quantized \({method}\)"):
        optimus.transform(model, "int8", backend=capable)


def test_other_places(capable):
    """Other backends, older processors and training are refused."""
    with pytest.raises(BackendUnavailableError, match="has no products of 8-bit weights"):
        optimus.plan(linear(), "int8", backend=optimus.Backend("cuda", "cuda"))
    with pytest.raises(BackendUnavailableError, match="not built for hpu"):
        optimus.plan(linear(), "int8", backend=optimus.Backend("hpu", "hpu"))
    with pytest.raises(BackendUnavailableError, match="no AVX512-VNNI"):
        optimus.plan(linear(), "int4", backend=optimus.Backend("x86", "cpu"))
    with pytest.raises(NothingToDoError, match="not for training"):
        optimus.plan(linear(), "int8", backend=capable, mode="training")


def test_without_compiled_kernels(capable, monkeypatch):
    """Claimed all the same, for the memory; the plan says that it is slow, and why."""
    monkeypatch.setattr(native, "available", lambda: "not built: there was no C compiler")
    model = linear()
    made = optimus.plan(model, "int8", backend=capable)
    (claim,) = made.claims
    assert claim.measured.startswith("slower than fp32")
    assert claim.measured.endswith("there was no C compiler")
    assert claim.measured in str(made)
    assert optimus.Plan.from_json(made.to_json()) == made
    x = torch.randn(2, 256)
    given = model(x)
    assert distance(rounded(model, capable, "int8")(x), given, None) < 2e-2
    monkeypatch.setattr(native, "available", lambda: None)
    assert not optimus.plan(linear(), "int8", backend=capable).claims[0].measured


def test_every_lossy_name_has_a_tolerance():
    """One table for the check, the laws and the documentation."""
    known = Registry.installed()
    lossy = [r for r in (*known.replacements, *known.passes) if r.fidelity is Fidelity.LOSSY]
    assert {r.name.rpartition(".")[2] for r in lossy} == LOSSY.keys()


def test_mixture(capable):
    """Globs of paths choose other bits or none; the rest follows the recipe; JSON keeps it all."""
    overrides = (("model.layers.0.*", "*.int8"), ("*.down_proj", "stock"))
    mixture = optimus.Recipe.named("int4", overrides=overrides)
    model = case("llama", CAUSAL).build(vocab_size=300)
    found = claims(model, capable, mixture)
    assert found["lm_head"] == "int8"
    assert found["model.layers.0.self_attn.q_proj"] == "int8"
    assert found["model.layers.0.mlp.down_proj"] == "int8"
    assert found["model.layers.1.mlp.up_proj"] == "int4"
    assert found.get("model.layers.1.mlp.down_proj") in (None, "packed")
    made = optimus.plan(model, mixture, backend=capable)
    again = optimus.Plan.from_json(made.to_json())
    assert again == made
    other = copy.deepcopy(model)
    mine, theirs = optimus.apply(model, again), rounded(other, capable, mixture)
    with torch.no_grad():
        assert torch.equal(mine(**batch(mine)).logits, theirs(**batch(theirs)).logits)


def test_groups_and_minima_are_names(capable):
    """Other groups, and codes with a minimum, are recipes of one line."""
    for name in ("int4-g64", "int4-g128", "int4-asymmetric"):
        recipe = optimus.Recipe(name, ((f"*.{name}",), ("*",)))
        assert claims(linear(), capable, recipe) == {"0": name}


def test_an_override_that_fits_nothing(capable):
    """A typing error in a glob is an error, and not a silent default."""
    mixture = optimus.Recipe.named("int4", overrides=(("model.layer.0.*", "*.int8"),))
    with pytest.raises(PlanError, match=r"override of 'model.layer.0.\*' fits no module"):
        optimus.plan(case("llama", CAUSAL).build(), mixture, backend=capable)


def test_tied_head(capable):
    """The head reads codes, the shared tensor stays, and what is written into it is effective."""
    model = case("llama", CAUSAL).build(vocab_size=300, tie_word_embeddings=True)
    stock = copy.deepcopy(model)
    table = model.model.embed_tokens.weight
    plan = optimus.plan(model, "int4", backend=capable)
    assert "on top of model.embed_tokens.weight, which stays as it is" in str(plan)
    rounded(model, capable, "int4")
    assert isinstance(model.lm_head, Quantized)
    assert model.lm_head.scheme.bits == 8
    assert model.lm_head.weight is table
    hidden = torch.randn(3, 256)
    with torch.no_grad():
        before = model.lm_head(hidden)
        assert 0 < distance(before, stock.lm_head(hidden), None) < 1e-2
        table.mul_(2)
        torch.testing.assert_close(model.lm_head(hidden), 2 * before)
        table.mul_(0.5)
    optimus.reverse(model)
    assert model.lm_head.weight is table
    assert values(model.state_dict()) == values(stock.state_dict())


@pytest.mark.parametrize("recipe", ["int8", "int8-dynamic", "int4"])
def test_generation(recipe, capable):
    """Greedy tokens are those that the same model picks from whole sequences, row by row."""
    model = rounded(case("llama", CAUSAL).build(), capable, recipe)
    tokens = generated(model)[:1]
    prompt = tokens.shape[1] - 8
    with torch.no_grad():
        logits = model(tokens).logits[0, prompt - 1 : -1]
    assert torch.equal(logits.argmax(-1), tokens[0, prompt:])


def test_weights_read_as_rounded_and_saved_as_original(capable):
    """``module.weight`` is what is computed with, dense; the checkpoint has the original."""
    model, x = linear(), torch.randn(5, 256)
    original = model[0].weight.detach().clone()
    rounded(model, capable, "int4")
    assert isinstance(model[0]._parameters["weight"], Placeholder)
    with torch.no_grad():
        mine = model(x)
        lent = model[0].weight
        assert 0 < distance(lent.detach(), original, None) < 0.2
        assert distance(model(x), mine, None) < 2e-2
        del lent
        assert torch.equal(model(x), mine)
    assert torch.equal(model.state_dict()["0.weight"], original)


def test_a_write_is_never_lost(capable):
    """Written elements survive the reverse as written; the others are the original's."""
    model, x = linear(bias=False), torch.randn(5, 256)
    original = model[0].weight.detach().clone()
    rounded(model, capable)
    with torch.no_grad():
        model[0].weight[7] = 3.0
        wanted = original.clone()
        wanted[7] = 3.0
        assert torch.allclose(model(x)[:, 7], 3 * x.sum(1), rtol=2e-2, atol=0.5)
    assert torch.equal(model.state_dict()["0.weight"], wanted)
    optimus.reverse(model)
    assert torch.equal(model[0].weight, wanted)


def test_an_assigned_weight_is_used(capable):
    """``layer.weight = ...`` replaces codes and original."""
    model = rounded(linear(bias=False), capable)
    zeros = nn.Parameter(torch.zeros(512, 256))
    model[0].weight = zeros
    with torch.no_grad():
        assert model(torch.randn(2, 256)).count_nonzero() == 0
    optimus.reverse(model)
    assert model[0].weight is zeros


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_recasting(dtype, capable):
    """``model.to(dtype)`` casts the original and keeps the codes; float64 has none and is dense."""
    model, stock, x = linear(), linear().to(dtype), torch.randn(3, 256)
    rounded(model, capable)
    with torch.no_grad():
        before = model(x)
        model.to(dtype)
        assert distance(model(x.to(dtype)).float(), before, None) < 1e-2
    assert model[0].weight.dtype is dtype
    assert values(model.state_dict()) == values(stock.state_dict())
    optimus.reverse(model)
    assert values(model.state_dict()) == values(stock.state_dict())


def test_adapters_train_on_top(capable):
    """The input's gradient is that of the rounded weight; the weight itself is not for training."""
    model = rounded(linear(), capable)
    x = torch.randn(4, 256, requires_grad=True)
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, model[0].weight.detach().sum(0).expand(4, 256))
    model(x)
    with pytest.raises(SurgeryError, match="for inference"):
        model.train()(x)
    model.requires_grad_(requires_grad=False)
    assert model(x).requires_grad


def test_autocast_is_stock(capable):
    """Under autocast the dense weight computes, in autocast's dtype."""
    model = rounded(linear(), capable)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.randn(2, 256)).dtype is torch.bfloat16


def test_calibration(capable):
    """With a sample, the features that come in large are rounded with more care."""
    loud = torch.ones(256)
    loud[::16] = 30
    x = torch.randn(64, 256) * loud
    errors = []
    for sample in (None, {"input": x[:32]}):
        model, stock = linear(), linear()
        rounded(model, capable, "int4", sample=sample)
        dense, given = model[0].weight.detach(), stock[0].weight.detach()
        errors.append(float(((dense - given) @ x[32:].t()).norm()))
        assert not model[0]._forward_pre_hooks
    assert errors[1] < 0.85 * errors[0]
    made = optimus.plan(stock, "int4", backend=capable)
    applied = optimus.apply(stock, made, sample={"input": x[:32]})
    assert torch.equal(applied[0].weight, model[0].weight)


def test_export_is_refused_by_name(capable):
    """Codes are this machine's own."""
    with pytest.raises(Exception, match="cannot be exported"):
        torch.export.export(rounded(linear(), capable), (torch.randn(2, 256),))


def test_what_is_left_is_packed(capable):
    """The exact swaps follow: a layer left in its precision may still be packed."""
    recipe = optimus.Recipe.named("int8", overrides=(("0", "stock"),))
    assert claims(case(PLAIN).build(), capable, recipe) == {"0": "packed", "2": "int8"}


@pytest.mark.parametrize(
    ("recipe", "scheme"), [("int8", INT8), ("int8-dynamic", INT8_DYNAMIC), ("int4", INT4)]
)
def test_the_readme_says_so(recipe, scheme):
    """The table of recipes: the tolerance of the check, and the bits that a weight takes."""
    text = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith(f"| `{recipe}` | "))
    *_, bits, tolerance, _ = row.split("|")
    weight = QuantizedWeight(torch.randn(1024, 4096), scheme)
    assert float(bits) == round(8 * weight.nbytes / 4096 / 1024, 1)
    assert float(tolerance) == LOSSY[recipe]
