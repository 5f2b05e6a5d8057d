"""What the tests of all rows and of all model types share: models, answers, and what ran in them."""

from __future__ import annotations

import copy
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import zoo
from snapshots import tensors
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import optimus
from optimus.core.planner import Recipe
from optimus.core.registry import Registry
from optimus.core.replacement import Replacement
from optimus.replacements import biased, decoders, handwritten, hosted, islands

CLOSE = 5e-6
PADDINGS = ("none", "right", "left", "ragged")
# By which file and which tuple of it a row stands.
GROUPS = {
    "A": hosted.GUARDED,
    "B": handwritten.ARCHITECTURES,
    "C": biased.ARCHITECTURES,
    "D": hosted.SINKS,
    "E": hosted.CAPPED,
    "MLA": decoders.LATENT,
    "GQA": decoders.GROUPED,
    "islands": islands.ARCHITECTURES,
}
# Those that the host can run on SDPA by itself, for who has loaded them in eager.
ON_REQUEST = "on request"


@dataclass(frozen=True)
class Row:
    """One replacement of attention, the type that it is for, and its group."""

    model_type: str
    replacement: Replacement
    group: str

    def __str__(self) -> str:
        return self.replacement.name.replace(".attention", "")

    @property
    def recipe(self) -> Recipe:
        """This row alone, so that nothing else blurs what it does."""
        return Recipe("row", ((self.replacement.name,),))


@functools.cache
def group_of(name: str) -> str:
    """The group of a replacement, by name."""
    for group, architectures in GROUPS.items():
        if any(name == r.name for a in architectures for r in a.replacements):
            return group
    return ON_REQUEST


def rows() -> list[Row]:
    """Every registered replacement of attention."""
    return [
        Row(a.model_type, r, group_of(r.name))
        for a in Registry.installed().architectures
        for r in a.replacements
        if ".attention." in r.name
    ]


def pays_everywhere() -> dict[str, Any]:
    """A table of costs in which every row pays at every length: tests are about answers."""
    kinds = ("float32", "bfloat16", "native-bfloat16", "float16")
    names = [r.replacement.name for r in rows() if r.replacement.gated]
    part = {"where": "no machine", "ratios": {name: {"1": 2.0} for name in names}}
    return {f"{backend}/{kind}": part for backend in ("x86", "arm") for kind in kinds}


@dataclass
class Seen:
    """Attention in one call: on a fused kernel, or written out, and then by which modules."""

    fused: int = 0
    written: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def owners(self, known: frozenset[str] = frozenset()) -> set[str]:
        """Classes that write scores out, without the ``known`` ones."""
        return {path[0] for path in self.written if not known & set(path)}


class Watch(TorchDispatchMode):
    """Counts fused kernels, and softmaxes over the last axis of three or more.

    The plain kernel behind ``scaled_dot_product_attention`` takes a softmax of its own name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__.partition(".")[0]
        if name.startswith("_scaled_dot_product"):
            self.seen.fused += 1
        elif name in ("_softmax", "_safe_softmax") and _is_of_scores(*args[:2]):
            self.seen.written[_callers()] += 1
        return func(*args, **(kwargs or {}))


def _is_of_scores(scores: Tensor, axis: int) -> bool:
    return scores.ndim >= 3 and axis in (-1, scores.ndim - 1)


def _callers() -> tuple[str, ...]:
    """The classes of the modules that are being called, the innermost first, torch's left out.

    Hooks would tell as well, and would change what runs: scores are written for who watches.
    """
    found: list[str] = []
    frame = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and not type(owner).__module__.startswith("torch."):
            name = type(owner).__qualname__
            if not found or found[-1] != name:
                found.append(name)
        frame = frame.f_back
    return tuple(found) or ("nothing",)


def answer(model: nn.Module, given: dict[str, Any], **options: Any) -> Any:
    """What the model says, from one random state: some draw queries or mask patches."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        return model(**given, **options)


def watched(model: nn.Module, given: dict[str, Any], **options: Any) -> tuple[Any, Seen]:
    """The answer, and what ran."""
    with Watch() as watch:
        out = answer(model, given, **options)
    return out, watch.seen


def mask_of(given: dict[str, Any]) -> Tensor | None:
    """Which positions have a defined answer."""
    mask = given.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def apart(mine: Any, stock: Any, mask: Tensor | None = None) -> float:
    """The larger of two relative errors, in norm and at the worst place; inf for another kind."""
    ours, theirs = dict(tensors(mine)), dict(tensors(stock))
    if type(mine) is not type(stock) or ours.keys() != theirs.keys():
        return float("inf")
    return max((_apart(ours[key], theirs[key], mask) for key in theirs), default=0.0)


def _apart(mine: Tensor, stock: Tensor, mask: Tensor | None) -> float:
    if mine.shape != stock.shape or mine.dtype != stock.dtype:
        return float("inf")
    a, b = (_real(t, mask).detach().double() for t in (mine, stock))
    finite = torch.isfinite(b)
    if not torch.equal(finite, torch.isfinite(a)):
        return float("inf")
    a, b = a[finite], b[finite]
    if torch.equal(a, b):
        return 0.0
    away = a - b
    return max(float(away.norm() / b.norm()), float(away.abs().max() / b.abs().max()))


def _real(value: Tensor, mask: Tensor | None) -> Tensor:
    """The real positions of hidden states, and of the cache's keys ``[batch, heads, length, d]``."""
    if mask is None or value.ndim < 2:
        return value
    if value.shape[:2] == mask.shape:
        return value[mask.bool()]
    if value.ndim == 4 and value.shape[::2] == mask.shape:
        return value.transpose(1, 2)[mask.bool()]
    return value


def transformed(
    stock: nn.Module, recipe: Any, backend: optimus.Backend, **options: Any
) -> nn.Module:
    """A transformed copy."""
    mine = copy.deepcopy(stock)
    return optimus.transform(mine, recipe, backend=backend, check=False, **options)


def batches(model: nn.Module, paddings: tuple[str, ...] = PADDINGS) -> Iterator[tuple[Any, Any]]:
    """Every padding with one sequence and with three, as far as they differ."""
    for padding in paddings:
        for batch in (1, 3):
            if batch == 1 and padding != "none":
                continue
            yield (padding, batch), zoo.inputs(model, batch=batch, padding=padding)
