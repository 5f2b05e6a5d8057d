"""Where the originals of rounded weights wait: bitwise return, memory, and what can go wrong."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import batch, case
from snapshots import identical, snapshot, values
from torch import nn

import optimus
from optimus.core.errors import IrreversibleError, PlanError, VerificationError
from optimus.core.verify import LOSSY

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """A Llama that came from a checkpoint in the folder ``tmp_path``."""
    from transformers import AutoModelForCausalLM

    case("llama", "AutoModelForCausalLM").build().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    # Saving writes into the config, also of a stock model.
    model.save_pretrained(tmp_path / "first")
    return model


def assert_saved_as(stock: Path, model: Any, folder: Path) -> None:
    """``save_pretrained`` writes the same bytes."""
    model.save_pretrained(folder)
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (stock / name).read_bytes()


@pytest.mark.parametrize("recipe", ["int8", "int8-dynamic", "int4"])
@pytest.mark.parametrize("keep", ["host", "disk", "source"])
def test_bitwise(saved, keep, recipe, tmp_path, capable):
    """The checkpoint is the stock one meanwhile, and everything is as before afterwards."""
    before = snapshot(saved)
    optimus.transform(saved, recipe, backend=capable, keep=keep)
    assert_saved_as(tmp_path, saved, tmp_path / "again")
    optimus.reverse(saved)
    assert snapshot(saved) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_models(saved, dtype, capable):
    """On top of bf16 and fp16, too."""
    model = saved.to(dtype)
    before = snapshot(model)
    optimus.transform(model, "int8", backend=capable, keep="disk")
    assert model.dtype is dtype
    optimus.reverse(model)
    assert snapshot(model) == before


def test_nothing_kept(saved, tmp_path, capable):
    """keep="none": saving and reversing raise; ``state_dict`` has the values in use."""
    stock = saved.state_dict()
    made = optimus.plan(saved, "int8", backend=capable, keep="none")
    assert "irreversible" in str(made)
    optimus.transform(saved, "int8", backend=capable, keep="none")
    with pytest.raises(IrreversibleError, match=r"keep='none'.*save_pretrained.*state_dict\(\)"):
        saved.save_pretrained(tmp_path / "never")
    with pytest.raises(IrreversibleError, match="was not kept"):
        optimus.reverse(saved)
    state = saved.state_dict()
    assert list(state) == list(stock)
    name = "model.layers.0.mlp.up_proj.weight"
    assert 0 < float((state[name] - stock[name]).norm() / stock[name].norm()) < 1e-2
    with torch.no_grad():
        answer = saved(**batch(saved))
    saved.load_state_dict(state)
    with torch.no_grad():
        again = saved(**batch(saved))
    assert float((again.logits - answer.logits).norm() / answer.logits.norm()) < LOSSY["int8"]


def test_nothing_kept_and_not_verified(saved, capable, monkeypatch):
    """keep="none" lets go only after the check: a model that fails it goes back."""
    before = snapshot(saved)
    monkeypatch.setitem(LOSSY, "int8", 0.0)
    monkeypatch.setitem(LOSSY, "int4", 0.0)
    with pytest.raises(VerificationError, match="The model was put back"):
        optimus.transform(saved, "int4", backend=capable, keep="none")
    assert snapshot(saved) == before


def test_full_disk(saved, capable, monkeypatch):
    """Originals that do not fit are refused before anything is dropped."""
    usage = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    before = snapshot(saved)
    with pytest.raises(OSError, match=r"keep='disk' needs [\d,]+ bytes"):
        optimus.transform(saved, "int8", backend=capable, keep="disk")
    assert snapshot(saved) == before


def test_a_source_that_differs(saved, capable):
    """Trained since, or another file: refused before anything is dropped."""
    with torch.no_grad():
        saved.model.layers[0].mlp.up_proj.weight.add_(1)
    before = snapshot(saved)
    with pytest.raises(PlanError, match=r"up_proj.weight .* is not what the model holds"):
        optimus.transform(saved, "int4", backend=capable, keep="source")
    assert snapshot(saved) == before


def test_a_source_that_changes(saved, tmp_path, capable):
    """The checkpoint was overwritten since: the reverse is refused and the model works on."""
    before = snapshot(saved)
    optimus.transform(saved, "int8", backend=capable, keep="source")
    answer = saved(**batch(saved))
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    # A new file in its place: the bytes that are mapped must not change under the model.
    file.unlink()
    file.write_bytes(whole[:-1_000_000] + bytes(1_000_000))
    with pytest.raises(IrreversibleError, match="has changed since the transform"):
        optimus.reverse(saved)
    assert identical(saved(**batch(saved)), answer)
    file.write_bytes(whole)
    optimus.reverse(saved)
    assert snapshot(saved) == before


def test_a_loaded_checkpoint_is_the_new_original(saved, tmp_path, capable):
    """Also where the old one waits on disk; what is the same stays there."""
    optimus.transform(saved, "int8", backend=capable, keep="disk")
    other = case("llama", "AutoModelForCausalLM").build(seed=1).state_dict()
    first, second = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"
    same = saved.state_dict()[f"{first}.weight"].clone()
    saved.load_state_dict(other | {f"{first}.weight": same})
    originals = {path: _original(saved.get_submodule(path)) for path in (first, second)}
    assert originals[first].value is None
    assert originals[second].value is not None
    optimus.reverse(saved)
    assert values(saved.state_dict()) == values(other | {f"{first}.weight": same})


def _original(module: nn.Module) -> Any:
    return vars(module)["_weight_state"].original


MEMORY = """
import gc, pathlib, sys
import torch, transformers
transformers.logging.disable_progress_bar()
import optimus
from optimus.core.memory import release

torch.set_num_threads(1)
backend = optimus.Backend("x86", "cpu", "", frozenset({"int8-products"}))
folder = pathlib.Path(sys.argv[1])

def resident():
    gc.collect()
    release()
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

def share(path, keep):
    before = resident()
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    optimus.transform(model, "int4", backend=backend, keep=keep)
    return (resident() - before) / sum(parameter.nbytes for parameter in model.parameters())

share(folder / "small", "disk")
print(share(folder / "large", "disk"), share(folder / "large", "source"))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bf16 Llama of 100 MB, and a small one to load all code by."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    large = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4}
    small = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    for name, sizes in {"large": large, "small": small}.items():
        config = LlamaConfig(vocab_size=1000, **heads, **sizes)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / name)
    return tmp_path


def test_memory(folder, monkeypatch):
    """What is kept in a file leaves memory: the resident size is 0.35 of bf16's at most."""
    monkeypatch.setenv("TMPDIR", str(folder))
    command = [sys.executable, "-W", "ignore", "-c", MEMORY, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shares = [float(share) for share in done.stdout.split()]
    assert len(shares) == 2
    assert all(0.2 < share <= 0.35 for share in shares), shares
