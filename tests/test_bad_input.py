"""What cannot be done: one clear error or a refusal in the plan, and the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import PLAIN, architecture, batch, case
from snapshots import identical, snapshot
from torch import nn

import optimus
from optimus.core.errors import (
    BackendUnavailableError,
    ConflictError,
    NothingToDoError,
    OptimusError,
    PlanError,
    RegistryError,
    SurgeryError,
    VerificationError,
)
from optimus.core.registry import Registry

pytestmark = pytest.mark.usefixtures("one_thread")

BERT, ANY = case("bert"), case(PLAIN)


def refusals(model: nn.Module, backend: optimus.Backend, recipe: str = "auto") -> dict[str, str]:
    """Why each site of a plan is left alone, by path."""
    made = optimus.plan(model, recipe, backend=backend)
    return {path: why.reason for path, _, why in made.refusals}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"recipe": "fast"}, PlanError, "unknown recipe 'fast'; known are auto, bf16"),
        ({"recipe": "fp8"}, BackendUnavailableError, "fp8 found nothing to do: not built for x86"),
        ({"backend": "gpu"}, ValueError, "unknown backend 'gpu'; known are cpu, x86"),
        ({"backend": "hpu"}, BackendUnavailableError, "'hpu' is not on this machine"),
        ({"mode": "production"}, ValueError, "unknown mode 'production'; known are 'inference'"),
        ({"keep": "cloud"}, PlanError, "unknown keep 'cloud'; known are host, disk, source, none"),
        ({"recipe": "bf16", "mode": "training"}, NothingToDoError, "bf16 is for inference"),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_unknown_choice(options, error, words, capable):
    """A name that is not known, or not built, or not for this, and what to say instead."""
    model = BERT.build()
    before = snapshot(model)
    with pytest.raises(error, match=words):
        optimus.transform(model, **{"backend": capable, **options})
    assert snapshot(model) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16], ids=str)
def test_bf16_of_what_is_not_fp32(dtype, capable):
    """The recipe casts fp32 models and no others, and says what it found."""
    model = ANY.build().to(dtype)
    found = str(dtype).removeprefix("torch.")
    with pytest.raises(NothingToDoError, match=f"the model is {found}, and only fp32 is cast"):
        optimus.transform(model, "bf16", backend=capable)


def test_bf16_without_the_hardware():
    """Emulated bf16 is slower than fp32: the recipe is refused with the measurement."""
    feeble = optimus.Backend("x86", "cpu", "GenuineIntel", frozenset({"packed-linear"}))
    with pytest.raises(BackendUnavailableError, match=r"no native bf16 arithmetic.*measured"):
        optimus.transform(BERT.build(), "bf16", backend=feeble)


def test_reverse_of_a_stock_model():
    """There is nothing to reverse, and it says so."""
    with pytest.raises(PlanError, match="not transformed: there is nothing to reverse"):
        optimus.reverse(BERT.build())


def test_already_transformed_names_both(capable):
    """The plan in force and the one asked for, also where they differ only in what is kept."""
    model = optimus.transform(BERT.build(), "bf16", backend=capable, check=False)
    asked = r"already transformed \(recipe bf16, x86, inference.*\) and '{}', .*asked for"
    with pytest.raises(PlanError, match=asked.format("auto")):
        optimus.transform(model, "auto", backend=capable)
    with pytest.raises(PlanError, match=r"keep host.*keep disk"):
        optimus.transform(model, "bf16", backend=capable, keep="disk")
    with pytest.raises(PlanError, match="already transformed"):
        optimus.plan(model, "bf16", backend=capable)
    assert optimus.is_transformed(model)


# torch.jit warns that it is old; it is still what people have.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_scripted(capable):
    """A scripted model is refused; a scripted part of a model is left alone."""
    model = ANY.build()
    scripted = torch.jit.script(model)
    with pytest.raises(SurgeryError, match="scripted model cannot be changed"):
        optimus.transform(scripted, backend=capable)
    mixed = nn.Sequential(scripted, nn.Linear(3, 30_000)).eval()
    made = optimus.plan(mixed, backend=capable)
    assert [claim.path for claim in made.claims] == ["1"]


class Linear8bit(nn.Linear):
    """What quantizers make: a subclass with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Dequantize and multiply."""
        return input @ (self.weight.float() * 0.5).t()


def test_quantized(capable):
    """A quantizer's subclass and an integer weight are refused by name, and stay as they are."""
    model = ANY.build()
    model[0].__class__ = Linear8bit
    int8 = torch.ones(256, 512, dtype=torch.int8)
    model[2].weight = nn.Parameter(int8, requires_grad=False)
    why = refusals(model, capable)
    assert why["0"] == "Linear8bit overrides the forward of Linear"
    assert why["2"] == "weight is int8"
    before = snapshot(model[0])
    optimus.transform(model, backend=capable, check=False)
    assert snapshot(model[0]) == before


def test_parametrized(capable):
    """A weight that is computed anew each time is not a parameter and is not packed."""
    model = torch.nn.utils.parametrizations.weight_norm(nn.Linear(512, 512)).eval()
    assert refusals(model, capable)[""] == "weight is missing"


def test_meta_only(capable):
    """A model without weights can be planned and not transformed."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 512))
    assert len(optimus.plan(model, backend=capable).claims) == 1
    with pytest.raises(SurgeryError, match="every weight is on meta: load the weights"):
        optimus.transform(model, backend=capable)
    assert type(model[0]) is nn.Linear


def test_patched_forward(capable):
    """Somebody's patch is left in force, at a site and at the root."""
    model = ANY.build()
    model[0].forward = lambda rows: torch.zeros(4, 512)
    assert refusals(model, capable)["0"] == "forward is patched on this instance"
    optimus.transform(model, backend=capable, check=False)
    assert type(model[0]) is nn.Linear
    root = ANY.build()
    root.forward = lambda rows: rows
    before = snapshot(root)
    with pytest.raises(OptimusError, match="patched"):
        optimus.transform(root, "bf16", backend=capable, check=False)
    assert snapshot(root) == before


@pytest.mark.parametrize("recipe", ["auto", "bf16"])
def test_nan_weights(recipe, capable):
    """A model that answers NaN cannot be verified, and NaN against NaN does not pass."""
    model = BERT.build()
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight[0, 0] = float("nan")
    before = snapshot(model)
    with pytest.raises(VerificationError, match=r"not finite.*put back") as caught:
        optimus.transform(model, recipe, backend=capable)
    assert not caught.value.verdict.ok
    assert snapshot(model) == before


@pytest.mark.parametrize("kind", ["single", "empty-row", "left", "hole", "none"])
def test_odd_samples(kind, capable):
    """Length 1, a row of padding alone, padding on the left: samples like any other."""
    model = BERT.build()
    optimus.transform(model, backend=capable, sample=batch(model, kind))
    assert optimus.is_transformed(model)


def test_unusable_sample(capable):
    """What the stock model raises on a sample is what the caller sees; nothing has changed."""
    model = BERT.build()
    before = snapshot(model)
    for sample in (batch(model, "empty"), {"pixels": torch.ones(1)}, {}):
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            optimus.transform(model, backend=capable, sample=sample)
        assert snapshot(model) == before


def recipe(*stages: tuple[str, ...], **options: Any) -> optimus.Recipe:
    """A recipe of the caller's own."""
    return optimus.Recipe("mine", stages, **options)


def test_nothing_to_do(capable):
    """A replacement asked for by name that takes no site is an error with the nearest miss."""
    with pytest.raises(NothingToDoError, match=r"gpt2.conv1d.packed.*no module.*of its kind"):
        optimus.plan(BERT.build(), recipe(("gpt2.conv1d.packed",)), backend=capable)
    with pytest.raises(NothingToDoError, match=r"any.linear.packed.*too small to pay"):
        optimus.plan(nn.Linear(4, 4), recipe(("any.linear.packed",)), backend=capable)


def test_conflict(capable):
    """Two patterns of one stage that take one site are both named."""
    both = recipe(("any.linear.packed", "any.linear.*"))
    with pytest.raises(ConflictError, match=r"'any.linear.packed' and 'any.linear.\*' both claim"):
        optimus.plan(ANY.build(), both, backend=capable)
    in_turn = recipe(("any.linear.packed",), ("*",), skip=("2",))
    made = optimus.plan(ANY.build(), in_turn, backend=capable)
    assert [claim.path for claim in made.claims] == ["0"]


def test_unregistered_name(capable):
    """A name with a typing error brings up the nearest one."""
    with pytest.raises(RegistryError, match=r"'any.linear.paked'; the nearest are any.linear.pa"):
        optimus.plan(ANY.build(), recipe(("any.linear.paked",)), backend=capable)


def test_duplicate_registration():
    """Two registrations under one name are refused by that name."""
    with pytest.raises(RegistryError, match=r"under one name: any.linear.packed"):
        Registry([architecture(PLAIN), architecture(PLAIN)])


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"recipe": {}}', "null"])
def test_not_a_plan(text):
    """JSON that is none, or not a plan's."""
    with pytest.raises(PlanError, match="not the JSON of a plan"):
        optimus.Plan.from_json(text)


def test_plan_for_another_model(capable):
    """A plan fits the model it was made for; on another it is refused before anything happens."""
    made = optimus.plan(BERT.build(), backend=capable)
    stranger = case("llama", "AutoModelForCausalLM").build()
    before = snapshot(stranger)
    with pytest.raises(PlanError, match="the plan was made for another model"):
        optimus.apply(stranger, made)
    assert snapshot(stranger) == before
    transformed = optimus.transform(BERT.build(), "bf16", backend=capable, check=False)
    with pytest.raises(PlanError, match="already transformed"):
        optimus.apply(transformed, made)


def test_what_follows_an_error_works(capable):
    """After a refusal the same model can be transformed and reversed as if nothing had been."""
    model = BERT.build()
    with torch.no_grad():
        expected = model(**batch(model))
    with pytest.raises(PlanError):
        optimus.transform(model, "fast", backend=capable)
    optimus.reverse(optimus.transform(model, backend=capable))
    with torch.no_grad():
        assert identical(model(**batch(model)), expected)
