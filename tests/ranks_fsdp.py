"""The two orders of optimus and FSDP2, on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models import batch
from ranks import (
    CAPABLE,
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
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import optimus
from optimus.replacements import _unpadding


def shard(model: nn.Module) -> nn.Module:
    """A group a decoder layer and one of the rest, as everybody does it."""
    for layer in layers(model):
        fully_shard(layer)
    return fully_shard(model)


def shard_finely(model: nn.Module) -> nn.Module:
    """Every module that has parameters of its own, and the attention and the MLP around them."""
    for layer in layers(model):
        for module in reversed(list(layer.modules())):
            if list(module.parameters()):
                fully_shard(module)
    return fully_shard(model)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The state dict in one piece, on rank 0; empty on others."""
    together = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=together)


def transform_then_shard(folder: Path) -> Findings:
    """Answers, words, checkpoints and the way back, for three families."""
    return {kind: _one_family(kind, folder / kind) for kind in ("llama", "qwen3", "gpt2")}


def _one_family(kind: str, folder: Path) -> Findings:
    stock, mine = language_model(kind), language_model(kind)
    optimus.transform(mine, backend=CAPABLE)
    packed = any(name.endswith("packed") for name in claimed(mine))
    shard(mine)
    found = {
        "packed": packed,
        "apart": apart(mine, stock),
        "words": same_words(mine, stock),
        "saved": _saved(mine, kind, folder),
    }
    optimus.reverse(mine)
    return found | {"back": is_stock(mine), "apart after": apart(mine, stock)}


def _saved(model: nn.Module, kind: str, folder: Path) -> bool:
    """Whether it writes what the stock model writes that is sharded alike; rank 0 writes."""
    stock, state = shard(language_model(kind)), whole(model)
    theirs = whole(stock)
    if dist.get_rank() != 0:
        return True
    for name, one, values in (("mine", model, state), ("stock", stock, theirs)):
        # A copy: what is written is taken out of it.
        one.save_pretrained(folder / name, state_dict=dict(values))
    files = [load_file(folder / name / "model.safetensors") for name in ("mine", "stock")]
    configs = {(folder / name / "config.json").read_text() for name in ("mine", "stock")}
    whole_stock = language_model(kind).state_dict()
    return is_same(state, whole_stock) and is_same(*files) and len(configs) == 1


def train(model: nn.Module, steps: int = 2) -> list[float]:
    """The losses of a few steps on one batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, losses = batch(model, "ones"), []
    for _ in range(steps):
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_sharded(folder: Path) -> Findings:
    """Transformed for training, sharded, trained, gathered: as the stock model trained alike."""
    found: Findings = {}
    for kind in ("llama", "qwen3", "gpt2"):
        stock, mine = (language_model(kind, attention="eager") for _ in range(2))
        optimus.transform(mine, backend=CAPABLE, mode="training")
        names = claimed(mine)
        shard(mine)
        losses = [abs(a - b) for a, b in zip(train(mine), train(stock), strict=True)]
        state, theirs = whole(mine), stock.state_dict()
        worst = max((float((state[k] - theirs[k]).norm()) for k in state), default=0.0)
        keys = list(state) in ([], list(theirs))
        found[kind] = {"claimed": names, "apart": max(worst, *losses), "keys": keys}
    return found


def odd_shards(folder: Path) -> Findings:
    """Parts in every corner, unequal batches, and what is rounded before it is sharded."""
    stock = language_model("llama")
    fine = optimus.transform(language_model("llama"), backend=CAPABLE)
    norm = layers(fine)[0].input_layernorm
    shard_finely(fine)
    found: Findings = {"fine": apart(fine, stock), "fine words": same_words(fine, stock)}
    found["part of a norm"] = _error(norm.forward.__func__, norm)
    found["unequal"] = _unequal(stock)
    for recipe in ("int8", "bf16"):
        mine = optimus.transform(language_model("llama"), recipe, backend=CAPABLE)
        shard(mine)
        found[recipe] = apart(mine, stock)
        found[f"{recipe} saved"] = objection(mine.state_dict)
        found[f"{recipe} back"] = objection(lambda mine=mine: optimus.reverse(mine))
    return found


def _error(forward: Any, norm: nn.Module) -> str:
    """What a call says that comes when the weight is a part, and nobody has gathered it."""
    try:
        with torch.no_grad():
            forward(norm, torch.ones(1, 256))
    except RuntimeError as error:
        return str(error)
    return ""


def _unequal(stock: nn.Module) -> float:
    """One rank has padding to leave out, and the other has none: as many gatherings on each."""
    mine = shard(optimus.transform(language_model("llama"), backend=CAPABLE))
    _unpadding.MOST_TOKENS = 4
    inputs = batch(stock, "left" if dist.get_rank() else "ones")
    with torch.no_grad():
        answers = [model(**inputs).logits[:, -1] for model in (mine, stock)]
    return float((answers[0] - answers[1]).norm() / answers[1].norm())


def shard_then_transform(folder: Path) -> Findings:
    """Swaps that own nothing are made; those that would lay weights out anew say why not."""
    stock, mine = language_model("llama"), shard(language_model("llama"))
    made = optimus.plan(mine, backend=CAPABLE)
    optimus.transform(mine, backend=CAPABLE)
    found = {
        "claimed": claimed(mine),
        "packed": sorted({w.reason for _, n, w in made.refusals if n == "any.linear.packed"}),
        "apart": apart(mine, stock),
        "words": same_words(mine, stock),
        "saved": _saved(mine, "llama", folder),
    }
    optimus.reverse(mine)
    found |= {"apart after": apart(mine, stock), "back": is_stock(mine)}
    for recipe in ("int8", "bf16"):
        found[recipe] = objection(lambda name=recipe: optimus.plan(mine, name, backend=CAPABLE))
    return found


def fsdp(folder: Path) -> Findings:
    """All of it, for one start of the processes."""
    works = (transform_then_shard, train_sharded, odd_shards, shard_then_transform)
    return {work.__name__: work(folder / work.__name__) for work in works}
