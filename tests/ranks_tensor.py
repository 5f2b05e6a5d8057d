"""The two orders of optimus and tensor parallelism, on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models import batch
from ranks import (
    CAPABLE,
    WORLD,
    Findings,
    apart,
    claimed,
    is_same,
    is_stock,
    language_model,
    layers,
    objection,
    same_words,
)
from safetensors.torch import load_file
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import optimus
from optimus.replacements import _layer

COLUMNS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def load(folder: Path) -> Any:
    """A checkpoint by transformers' own plan, half of it on each rank."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    plan = DistributedConfig(tp_plan="auto", tp_size=WORLD)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan).eval()


def by_the_plan(folder: Path) -> Findings:
    """Loaded in parts, then transformed: answers, words, checkpoint, and the way back."""
    return {kind: _one_family(kind, folder / kind) for kind in ("llama", "qwen3")}


def _one_family(kind: str, folder: Path) -> Findings:
    stock = language_model(kind)
    stock.save_pretrained(folder / "stock")
    dist.barrier()
    plain, mine = load(folder / "stock"), load(folder / "stock")
    part = layers(mine)[0].mlp.down_proj.weight
    found: Findings = {"parts": part.shape[1] // part.to_local().shape[1]}
    for recipe in ("int8", "bf16"):
        found[recipe] = objection(lambda name=recipe: optimus.plan(mine, name, backend=CAPABLE))
    optimus.transform(mine, backend=CAPABLE)
    found |= {
        "claimed": claimed(mine),
        "apart": max(apart(mine, stock), apart(mine, plain)),
        "words": same_words(mine, stock) and same_words(mine, plain),
    }
    mine.save_pretrained(folder / "mine")
    plain.save_pretrained(folder / "plain")
    dist.barrier()
    states = [load_file(folder / n / "model.safetensors") for n in ("mine", "plain", "stock")]
    found["saved"] = is_same(states[0], states[1]) and is_same(states[0], states[2])
    optimus.reverse(mine)
    return found | {"back": is_stock(mine), "apart after": apart(mine, plain)}


def by_torch(folder: Path) -> Findings:
    """Transformed and packed, then cut up by torch's ``parallelize_module``."""
    mesh = init_device_mesh("cpu", (WORLD,))
    stock, found = language_model("llama"), {}
    for recipe in ("auto", "int8"):
        mine = optimus.transform(language_model("llama"), recipe, backend=CAPABLE)
        cut = {name: ColwiseParallel() for name in COLUMNS} | {n: RowwiseParallel() for n in ROWS}
        for layer in layers(mine):
            parallelize_module(layer, mesh, cut)
        found[recipe] = apart(mine, stock)
        found[f"{recipe} words"] = same_words(mine, stock)
    return found


def by_hand(folder: Path) -> Findings:
    """Transformed, then given transformers' plan: the values themselves are cut up."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    stock, mine = language_model("llama"), language_model("llama")
    optimus.transform(mine, backend=CAPABLE)
    plan = DistributedConfig(tp_plan="auto", tp_size=WORLD)
    mine.maybe_distribute_model(mine, plan, initialize_distributed_mesh(plan)[1])
    return {
        "apart": apart(mine, stock),
        "words": same_words(mine, stock),
        "back": objection(lambda: optimus.reverse(mine)),
    }


def whole_layers(folder: Path) -> Findings:
    """Sums over the ranks, around products that stay whole: no call of a whole layer skips them."""
    from transformers.integrations.tensor_parallel import apply_tensor_parallelism

    mesh = init_device_mesh("cpu", (WORLD,))
    # So wide that all of its products are rounded, as a call of a whole layer wants them.
    stock, mine = (language_model("llama", hidden_size=512) for _ in range(2))
    optimus.transform(mine, "int8", backend=CAPABLE)
    calls = _counted()
    same_words(mine, stock)
    found = {"whole calls before": len(calls)}
    calls.clear()
    for model in (mine, stock):
        names = [f"model.layers.{n}.{name}" for n in range(2) for name in ROWS]
        apply_tensor_parallelism(model, mesh, dict.fromkeys(names, "all_reduce"))
    found |= {"apart": apart(mine, stock), "step": _step(mine, stock)}
    return found | {"whole calls after": len(calls)}


def _counted() -> list[int]:
    calls: list[int] = []
    decode = _layer.decoder.decode

    def counting(*args: Any) -> Any:
        calls.append(1)
        return decode(*args)

    _layer.decoder.decode = counting
    return calls


def _step(mine: nn.Module, stock: nn.Module) -> float:
    """How far the logits of decoded tokens are apart."""
    usual = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    usual |= {"output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad():
        said = [torch.cat(m.generate(**batch(m, "ones"), **usual).logits) for m in (mine, stock)]
    return float((said[0] - said[1]).norm() / said[1].norm())


def tensor(folder: Path) -> Findings:
    """All of it, for one start of the processes."""
    works = (by_the_plan, by_torch, by_hand, whole_layers)
    return {work.__name__: work(folder / work.__name__) for work in works}
