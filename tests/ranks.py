"""What two processes find out about sharded models. They compute, and the test that started them
compares: every finding is a number, a text or a list of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from models import batch, case
from snapshots import Bits, distance
from torch import Tensor, nn
from torch import distributed as dist
from torch import multiprocessing as mp

import optimus
from optimus.core.errors import OptimusError
from optimus.core.planner import JOURNAL

WORLD, SECONDS = 2, 100
FEATURES = ("packed-linear", "packed-linear-bf16", "native-bf16", "int8-products")
CAPABLE = optimus.Backend("x86", "cpu", "AuthenticAMD", frozenset(FEATURES))
KINDS = ("ones", "left", "right")
Findings = dict[str, Any]


def launch(work: Callable[[Path], Findings], folder: Path) -> list[Findings]:
    """What ``work`` found on every rank. An error in one process, or a hang, is an error here."""
    context = mp.spawn(_run, (work, folder), nprocs=WORLD, join=False)
    assert context is not None
    deadline = time.monotonic() + SECONDS
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{work.__name__} hangs: {SECONDS} s are over")
    finally:
        for process in context.processes:
            process.kill()
    return [json.loads(_answers(folder, rank).read_text()) for rank in range(WORLD)]


def _answers(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _run(rank: int, work: Callable[[Path], Findings], folder: Path) -> None:
    torch.set_num_threads(1)
    # Through a file: no port that another process could take first.
    meeting, patience = f"file://{folder / 'rendezvous'}", timedelta(seconds=SECONDS / 2)
    dist.init_process_group("gloo", meeting, patience, WORLD, rank)
    _answers(folder, rank).write_text(json.dumps(work(folder)))
    dist.barrier()
    dist.destroy_process_group()


def language_model(model_type: str, attention: str = "default", **changes: Any) -> nn.Module:
    """A tiny one with a head, the same on every rank; ``changes`` go into its config."""
    return case(model_type, "AutoModelForCausalLM", attention=attention).build(**changes)


def layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers."""
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))


def apart(model: nn.Module, stock: nn.Module) -> float:
    """The largest relative error of the logits of any batch, this rank's own."""
    errors = []
    for kind in KINDS:
        inputs = batch(stock, kind)
        with torch.no_grad():
            answers = model(**inputs), stock(**inputs)
        errors.append(distance(*answers, inputs["attention_mask"]))
    return max(errors)


def same_words(model: nn.Module, stock: nn.Module) -> bool:
    """Whether greedy decoding says the same."""
    return all(torch.equal(_said(model, kind), _said(stock, kind)) for kind in KINDS[:2])


def _said(model: nn.Module, kind: str) -> Tensor:
    count = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    with torch.no_grad():
        return model.generate(**batch(model, kind), **count, pad_token_id=0)


def claimed(model: nn.Module) -> list[str]:
    """The last words of what was swapped."""
    made = vars(model)[JOURNAL].plan
    return sorted({claim.replacement.partition(".")[2] for claim in made.claims})


def is_stock(model: nn.Module) -> bool:
    """Whether no class of ours is left."""
    kinds = {cls.__module__ for m in model.modules() for cls in type(m).__mro__}
    return not any(name.startswith("optimus") for name in kinds)


def objection(work: Callable[[], Any]) -> str:
    """What optimus says against it; "" where it does it."""
    try:
        work()
    except OptimusError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def is_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two state dicts have the same keys in the same order, and the same bits."""
    bits = ({key: Bits(value) for key, value in state.items()} for state in (one, other))
    return list(one) == list(other) and next(bits) == next(bits)
