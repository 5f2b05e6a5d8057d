"""One side of a comparison, alone in its process.

Two runtimes in one process slow each other (a pool that spins, a heap they share), so every side
is its own: ``python -m optimus.measure.side`` reads one JSON order a line on stdin and answers one
JSON line each. Between orders it sleeps on stdin and costs nothing to the side that is running.

A side is named ``module:function``. The function takes a ``Task`` and the batches, and returns a
``Runner``; ``transformers_side`` below is stock and every recipe, and peers bring their own.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from optimus.core.errors import (
    BackendUnavailableError,
    NothingToDoError,
    OptimusError,
    VerificationError,
)
from optimus.core.planner import Plan
from optimus.core.recipes import Attention
from optimus.measure import load, machine, text
from optimus.measure.answers import AGREEMENT, PERPLEXITY, SIMILARITY
from optimus.measure.perplexity import Perplexity, perplexity
from optimus.measure.text import Batch

STOCK = "stock"

# Their first position is the one after the padding token's number; the rows below stay unused.
COUNTS_FROM_PADDING = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one side is to do, as it is sent to its process.

    ``swaps``: of the recipe's plan, the passes and replacements that alone are made; None for all.
    """

    model: str
    texts: list[str]
    batch: int
    length: int
    side: str = "optimus.measure.side:transformers_side"
    recipe: str = STOCK
    dtype: str = "float32"
    attention: Attention = "auto"
    swaps: list[str] | None = None


@dataclass(frozen=True, slots=True)
class Runner:
    """A model that is ready to be timed.

    ``forward`` gives ``[texts, tokens, features]``, or ``[texts, features]`` from a head.
    """

    forward: Callable[[Batch], Tensor]
    facts: dict[str, object] = field(default_factory=dict)


def _output(model: nn.Module, batch: Batch) -> Tensor:
    result = model(**batch)
    hidden: Tensor | None = getattr(result, "last_hidden_state", None)
    return result.logits if hidden is None else hidden


def _transform(model: nn.Module, task: Task, batch: Batch) -> dict[str, object]:
    """Transform, verified on the data's own first batch where optimus cannot build a probe."""
    import optimus

    plan = optimus.plan(model, task.recipe, attention=task.attention)
    unverified = plan.verification.startswith("not verified")
    sample = batch if unverified else None
    if task.swaps is None:
        optimus.transform(model, task.recipe, attention=task.attention, sample=sample)
    else:  # a part of a plan is no recipe, so nothing checks it but the error that is measured
        optimus.apply(model, _part(plan, frozenset(task.swaps)), sample=sample)
    swaps = list(dict.fromkeys((*plan.passes, *(claim.replacement for claim in plan.claims))))
    return {"claims": len(plan.claims), "passes": list(plan.passes), "swaps": swaps}


def _part(plan: Plan, swaps: frozenset[str]) -> Plan:
    """The plan with these passes and replacements only."""
    claims = tuple(claim for claim in plan.claims if claim.replacement in swaps)
    passes = tuple(name for name in plan.passes if name in swaps)
    return dataclasses.replace(plan, claims=claims, passes=passes)


def transformers_side(task: Task, batches: list[Batch]) -> Runner:
    """The model as transformers loads it, or transformed by the task's recipe."""
    model = load.load_model(task.model, dtype=getattr(torch, task.dtype))
    facts = {} if task.recipe == STOCK else _transform(model, task, batches[0])

    def forward(batch: Batch) -> Tensor:
        return _output(model, batch)

    return Runner(forward, facts)


def _real(output: Tensor, batch: Batch) -> Tensor:
    """The rows of real tokens; all of it where the output has no token axis."""
    mask = batch["attention_mask"].bool()
    return output[mask] if output.shape[:2] == mask.shape else output


@torch.inference_mode()
def _save(runner: Runner, batches: list[Batch], path: Path) -> None:
    """One safetensors file a batch, so that the reader holds one batch at a time."""
    from safetensors.torch import save_file

    for number, batch in enumerate(batches):
        output = runner.forward(batch)
        real = _real(output, batch)
        kept = {"output": real.float().contiguous()}
        if real is not output:
            kept["counts"] = batch["attention_mask"].sum(dim=1)
        save_file(kept, path / f"{number}.safetensors")


@torch.inference_mode()
def _seconds(runner: Runner, batches: list[Batch]) -> float:
    start = time.perf_counter()
    for batch in batches:
        runner.forward(batch)
    return time.perf_counter() - start


def _factory(name: str) -> Callable[[Task, list[Batch]], Runner]:
    module, _, function = name.partition(":")
    found: Callable[[Task, list[Batch]], Runner] = getattr(
        importlib.import_module(module), function
    )
    return found


def _check_fit(config: Any, batches: list[Batch]) -> None:
    """Say it before torch does, in the middle of the model and without a name."""
    if config.is_encoder_decoder:
        raise load.LoadError(
            f"{config.model_type} is an encoder-decoder; encoders and decoders can be measured."
        )
    largest = max(int(batch["input_ids"].max()) for batch in batches)
    if largest >= (rows := config.get_text_config().vocab_size):
        raise load.LoadError(
            f"the tokenizer gives token {largest} and the model has {rows}: they are not a pair."
        )


def _positions(config: Any) -> int:
    """How many tokens the model has positions for."""
    rows = getattr(config, "max_position_embeddings", None) or sys.maxsize
    reserved = config.pad_token_id + 1 if config.model_type in COUNTS_FROM_PADDING else 0
    return int(rows) - reserved


def _judged_by(config: Any) -> str:
    """What tells whether the model's answers are still good, by the head that its class has."""
    from transformers.models.auto import modeling_auto

    name = load.model_class(config).__name__
    if name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return PERPLEXITY
    return AGREEMENT if "For" in name else SIMILARITY


def _surprise(task: Task, runner: Runner, length: int) -> Perplexity:
    """Perplexity on the whole texts, in windows of the batches' length that overlap by half."""
    tokenizer = load.load_tokenizer(task.model)
    ids = [tokenizer(one, verbose=False)["input_ids"] for one in task.texts]
    length = max(length, 2)
    stride = length // 2
    return perplexity(runner.forward, ids, length=length, stride=stride, batch=task.batch)


def _prepare(task: Task) -> tuple[Runner, list[Batch], dict[str, Any]]:
    tokenizer = load.load_tokenizer(task.model)
    config = load.read_config(task.model)
    length = min(task.length, _positions(config.get_text_config()))
    batches = text.batches(tokenizer, task.texts, size=task.batch, length=length)
    _check_fit(config, batches)
    runner = _factory(task.side)(task, batches)
    _seconds(runner, batches)  # warm up: first calls allocate, pick kernels and compile
    real, places = text.count_tokens(batches)
    facts = {"tokens": real, "places": places, "length": length, "judge": _judged_by(config)}
    return runner, batches, facts


def _quality(task: Task, runner: Runner, facts: dict[str, Any]) -> dict[str, object]:
    if facts["judge"] != PERPLEXITY:
        return {}
    found = _surprise(task, runner, facts["length"])
    return {PERPLEXITY: found.value, "scored": found.tokens}


def _answers(orders: Iterator[dict[str, Any]], task: Task) -> Iterator[dict[str, object]]:
    runner, batches, facts = _prepare(task)
    yield {
        "event": "ready",
        "facts": facts | runner.facts,
        "loaded_bytes": machine.resident_bytes(),
        "threads": torch.get_num_threads(),
        "allocator": machine.allocator(),
    }
    for order in orders:
        if order["do"] == "run":
            yield {"event": "time", "seconds": _seconds(runner, batches)}
        else:
            peak = machine.peak_bytes()  # before the outputs are gathered, which is our own cost
            _save(runner, batches, Path(order["folder"]))
            yield {"event": "end", "peak_bytes": peak, **_quality(task, runner, facts)}


def _failure(error: OptimusError) -> dict[str, object]:
    kinds = {
        BackendUnavailableError: "refused",
        NothingToDoError: "refused",
        VerificationError: "unverified",
    }
    return {"event": kinds.get(type(error), "failed"), "reason": str(error)}


def serve(orders: TextIO, replies: TextIO) -> None:
    """Read the task, then answer orders until stdin closes."""
    decoded = (json.loads(line) for line in orders)
    order = next(decoded, None)
    if order is None:  # the parent was interrupted before it said anything
        return
    task = Task(**order)

    def reply(answer: dict[str, object]) -> None:
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    try:
        for answer in _answers(decoded, task):
            reply(answer)
    except OptimusError as error:
        reply(_failure(error))


def main() -> None:
    """Serve on the real stdout; what libraries print goes to stderr, out of the protocol's way."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, replies)


def encode(task: Task) -> str:
    """The first line that a side's process reads."""
    return json.dumps(dataclasses.asdict(task))


if __name__ == "__main__":
    main()
