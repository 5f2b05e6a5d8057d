"""What was measured to pay, where, and at which length: the table that plans decide by.

The table ships as data. Its keys are a backend and a dtype, and for bf16 whether the processor
computes in it; its values are, for each replacement, how many times faster than stock the site was
at each number of keys.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch

from optimus.core.backend import Context
from optimus.core.errors import Refusal

# What a claim has to bring at some length that is not extreme.
GAIN, USUAL = 1.3, 1000
LONGEST = 1 << 62


@dataclass(frozen=True, slots=True)
class Measured:
    """Times faster than stock by number of keys, in ascending order."""

    ratios: tuple[tuple[int, float], ...]
    where: str

    @property
    def lengths(self) -> tuple[int, int] | None:
        """The first number of keys from which on it never was slower, and the last.

        None where it nowhere brings what a claim has to. Below the shortest measured length
        nothing is known, and nothing claimed.
        """
        first = 1
        for length, ratio in self.ratios:
            if ratio < 1:
                first = length + 1
        longer = [length for length, _ in self.ratios if length >= first]
        gains = [ratio for length, ratio in self.ratios if length <= USUAL]
        if not longer or max(gains, default=0.0) < GAIN:
            return None
        return longer[0], LONGEST

    def __str__(self) -> str:
        found = ", ".join(f"{ratio:.2f}x at {length}" for length, ratio in self.ratios)
        return f"measured {found} keys ({self.where})"


@functools.cache
def _table() -> dict[str, Any]:
    text = files("optimus").joinpath("costs.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def key(context: Context) -> str:
    """Under which name the table holds this hardware and dtype."""
    backend = context.backend
    kind = str(context.dtype).removeprefix("torch.")
    native = context.dtype is torch.bfloat16 and "native-bf16" in backend.features
    return f"{backend.name}/{'native-' if native else ''}{kind}"


def backends(name: str) -> frozenset[str]:
    """Where the table says that a replacement pays, in some dtype."""
    return frozenset(
        kind.partition("/")[0]
        for kind in _table()
        if isinstance(found := _found(name, kind), Measured) and found.lengths
    )


def measured(name: str, context: Context) -> Measured | Refusal:
    """What the table says of a replacement; a refusal where it says nothing, or no gain."""
    found = _found(name, key(context))
    if found is None:
        return Refusal(f"not measured on {key(context)}")
    return found if found.lengths else Refusal(f"does not pay: {found}")


def _found(name: str, kind: str) -> Measured | None:
    part = _table().get(kind, {})
    ratios = part.get("ratios", {})
    found = ratios.get(name) or ratios.get("*." + name.partition(".")[2])
    if not found:
        return None
    pairs = tuple(sorted((int(length), ratio) for length, ratio in found.items()))
    return Measured(pairs, part["where"])
