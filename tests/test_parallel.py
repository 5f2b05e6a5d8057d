"""Several processes or devices share a model: FSDP2, tensor parallelism, ``device_map``."""

from __future__ import annotations

import pytest
import torch
from ranks import apart, claimed, is_stock, language_model, launch, same_words
from ranks_fsdp import fsdp
from ranks_tensor import tensor
from snapshots import values

import optimus
from optimus.core.errors import NothingToDoError
from optimus.core.verify import CLOSE, LOSSY
from optimus.ops import native

pytestmark = pytest.mark.usefixtures("one_thread")

FP32 = CLOSE[torch.float32]
UNHELD = {"attention.grouped", "decoder.unpadded"}
STEPS = {"step.attention", "step.layer", "step.mlp", "step.norm"} if native.steps() else set()


def both(folder):
    """All that two processes are asked, for one start of them."""
    return fsdp(folder) | tensor(folder)


def test_two_processes(tmp_path):
    """FSDP2 and tensor parallelism, in every order with a transform: stock in every way."""
    for found in launch(both, tmp_path):
        demand_fsdp(found)
        demand_tensor_parallel(found)


def demand_fsdp(found):
    """Stock answers, words and files, and the way back, in both orders."""
    for one in found["transform_then_shard"].values():
        assert one["packed"]
        demand_stock(one)
    for one in found["train_sharded"].values():
        assert one["claimed"] == ["attention.fused"]
        assert one["apart"] < FP32
        assert one["keys"]
    demand_odd_shards(found["odd_shards"])
    late = found["shard_then_transform"]
    # transformers wraps the forward of every subclass of a layer, as FSDP's is one.
    assert set(late["claimed"]) == UNHELD | STEPS - {"step.layer"}
    assert late["packed"] == ["its weights are sharded; transform first, then shard"]
    demand_stock(late)
    demand_refused(late)


def demand_tensor_parallel(found):
    """Cut up by transformers' plan before; by torch, or by that plan, after."""
    for one in found["by_the_plan"].values():
        assert one["parts"] == 2
        assert set(one["claimed"]) == UNHELD | STEPS
        demand_stock(one)
        demand_refused(one)
    after = found["by_torch"]
    assert after["auto"] < FP32
    assert after["int8"] < LOSSY["int8"]
    assert after["auto words"]
    by_hand = found["by_hand"]
    assert by_hand["apart"] < FP32
    assert by_hand["words"]
    assert "forward was patched on this instance" in by_hand["back"]
    summed = found["whole_layers"]
    assert bool(summed["whole calls before"]) == bool(STEPS)
    assert summed["whole calls after"] == 0
    assert max(summed["apart"], summed["step"]) < LOSSY["int8"]


def demand_stock(found):
    """The answers, words and files of the stock model, and itself after the reverse."""
    assert found["apart"] < FP32
    assert found["words"]
    assert found["saved"]
    assert found["apart after"] < FP32
    assert found["back"]


def demand_refused(found):
    """Nothing is rounded or cast of which this process has a part only."""
    assert found["int8"].startswith("NothingToDoError: *.int8 found nothing to do: its weights are")
    assert "the model is sharded; cast it first, then shard" in found["bf16"]


def demand_odd_shards(found):
    """Whatever FSDP cuts, and whoever has padding: right, or an error that says why."""
    assert max(found["fine"], found["unequal"]) < FP32
    assert found["fine words"]
    assert "mixed torch.Tensor and DTensor" in found["part of a norm"]
    for recipe in ("int8", "bf16"):
        assert found[recipe] < LOSSY[recipe]
        assert "sharded after that: what this process holds is a part" in found[f"{recipe} saved"]
        assert "the originals are whole" in found[f"{recipe} back"]


ON = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
ON |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}


# transformers says how much memory that takes.
@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules:UserWarning")
@pytest.mark.parametrize("recipe", ["auto", "int8", "bf16"])
def test_transform_then_dispatch(recipe, tmp_path, capable):
    """Two devices of accelerate's, one of them the disk: answers, words, files, and back."""
    from accelerate import dispatch_model
    from transformers import AutoModelForCausalLM

    stock, mine = language_model("llama"), language_model("llama")
    optimus.transform(mine, recipe, backend=capable)
    dispatch_model(mine, ON, main_device="cpu", offload_dir=tmp_path / "off", force_hooks=True)
    for _ in range(2):
        assert apart(mine, stock) < (FP32 if recipe == "auto" else LOSSY[recipe])
    assert recipe != "auto" or same_words(mine, stock)
    mine.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert values(saved.state_dict()) == values(stock.state_dict())
    optimus.reverse(mine)
    assert is_stock(mine)
    assert apart(mine, stock) == 0


def test_dispatched_by_device_map(tmp_path, capable):
    """Loaded with ``device_map``: what is on the disk keeps its layout, the rest is swapped."""
    from transformers import AutoModelForCausalLM

    stock = language_model("llama")
    stock.save_pretrained(tmp_path / "stock")
    folders = {"offload_folder": tmp_path / "off", "device_map": ON}
    mine = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", **folders).eval()
    made = optimus.plan(mine, backend=capable)
    packed = [c.path for c in made.claims if c.replacement == "any.linear.packed"]
    assert packed
    assert all(path.startswith("model.layers.0.") for path in packed)
    with pytest.raises(NothingToDoError, match="is offloaded; cast the model before"):
        optimus.plan(mine, "bf16", backend=capable)
    optimus.transform(mine, backend=capable)
    assert set(claimed(mine)) == UNHELD | STEPS | {"linear.packed"}
    assert apart(mine, stock) < FP32
    assert same_words(mine, stock)
    optimus.reverse(mine)
    assert is_stock(mine)
    assert apart(mine, stock) == 0
