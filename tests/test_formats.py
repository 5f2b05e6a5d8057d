"""Weights that somebody stored as compressed-tensors, on the kernels as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_kill import small

import optimus
from optimus.core.errors import IrreversibleError, OptimusError
from optimus.core.planner import JOURNAL
from optimus.export import formats
from optimus.export.convert import convert
from optimus.ops.quantized import QuantizedWeight
from optimus.ops.rounding import zero_code

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A decoder just large enough."""
    return small(tmp_path_factory.mktemp("formats") / "model")


@pytest.fixture
def foreign(model, tmp_path):
    """A rounded folder that says nothing of optimus."""
    convert(str(model), tmp_path / "foreign", "int8-dynamic")
    (tmp_path / "foreign" / "optimus.json").unlink()
    return tmp_path / "foreign"


def ids() -> torch.Tensor:
    """A batch."""
    return torch.arange(40).view(2, 20)


def rewrite(folder: Path, change) -> None:
    """Change the tensors of the one file of a folder."""
    file = folder / "model.safetensors"
    held = load_file(file)
    change(held)
    save_file(held, file, {"format": "pt"})


@pytest.mark.parametrize("scheme", formats.NAMES, ids=formats.NAMES.get)
@pytest.mark.parametrize("shape", [(16, 128), (37, 256)], ids=str)
def test_codes_there_and_back(scheme, shape):
    """What is stored is the weight that was rounded, and the library reads it as its values."""
    torch.manual_seed(0)
    weight = QuantizedWeight(torch.randn(shape), scheme)
    codes, scale = formats.written(weight)
    name = "weight" if scheme.rows else "weight_packed"
    held = {name: codes, "weight_scale": scale, "weight_shape": torch.tensor(shape)}
    if scheme.rows:
        del held["weight_shape"]
    else:
        whole = (weight.plain().codes.to(torch.int16) - zero_code(scheme.bits)).to(torch.int8)
        packed = formats.library("compressors").pack_to_int32(whole, scheme.bits)
        assert torch.equal(codes, packed)
    back = formats.taken_in("x", held, torch.float32)
    assert back.scheme == scheme
    assert torch.equal(back.dense(), weight.dense())
    x = torch.randn(3, shape[1])
    assert torch.equal(back.matmul(x, None), weight.matmul(x, None))
    config = formats.config({"x": scheme}, ["x"])
    library = formats.library("quantization").QuantizationConfig.model_validate(config)
    group = library.config_groups["group_0"]
    compressor = formats.library("compressors").BaseCompressor.get_value_from_registry(group.format)
    wide = {**held, "weight_scale": scale.float()}
    assert torch.equal(compressor.decompress(wide, group)["weight"], weight.dense())


def test_a_folder_of_others(model, foreign, capable):
    """It answers as the recipe does; there is no original, and that is said."""
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(model).eval()
    expected = optimus.transform(stock, "int8-dynamic", backend=capable)
    mine = optimus.load(foreign, backend=capable)
    with torch.no_grad():
        assert torch.equal(mine(ids()).logits, expected(ids()).logits)
    claims = {c.path: c.replacement for c in vars(mine)[JOURNAL].plan.claims}
    assert claims["model.layers.0.mlp.up_proj"] == "any.linear.int8-dynamic"
    with pytest.raises(IrreversibleError, match="was not kept"):
        optimus.reverse(mine)


NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h.update({f"{NAME}_zero_point": torch.zeros(1)}), "weight_zero_point"),
        (lambda h: h.update({f"{NAME}_scale": h[f"{NAME}_scale"].float() * 1.001}), "finer than"),
        (lambda h: h.update({f"{NAME}_scale": torch.ones(3, 1)}), "no kernel here"),
        (lambda h: h.update({NAME: h[NAME].to(torch.float8_e4m3fn)}), "no kernel here"),
        (lambda h: h.update({NAME: torch.zeros(3, dtype=torch.int8)}), "do not fit each other"),
    ],
)
def test_layouts_without_a_kernel(change, words, foreign, capable):
    """Refused, with the layer and the reason, and never read as something else."""
    rewrite(foreign, change)
    with pytest.raises(OptimusError, match=words):
        optimus.load(foreign, backend=capable)


@pytest.mark.parametrize("method", ["gptq", "awq", "gguf", 3])
def test_other_methods(method, foreign, capable):
    """Only compressed-tensors is taken in."""
    config = json.loads((foreign / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (foreign / "config.json").write_text(json.dumps(config))
    with pytest.raises(OptimusError, match="is not taken in"):
        optimus.load(foreign, backend=capable)


def test_static_activations(foreign, capable):
    """Scales that were found beforehand are not those of the kernels."""
    config = json.loads((foreign / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"].update(dynamic=False, strategy="tensor")
    (foreign / "config.json").write_text(json.dumps(config))
    with pytest.raises(OptimusError, match="input_activations"):
        optimus.load(foreign, backend=capable)
