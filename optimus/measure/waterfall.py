"""Where the gain of a recipe comes from: its swaps, added one kind after another.

The sides are stock, the first swap alone, the first two, and so on to the whole recipe, all in one
alternated measurement. What a swap gains depends on what is there already, so another order would
share the same gain differently; this is the order in which the plan makes them.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from optimus.measure.figures import Comparison, Row
from optimus.measure.side import STOCK, Task

# Each is a process that holds a model, and a reader looks for the largest few.
MOST = 8


@dataclass(frozen=True, slots=True)
class Fall:
    """What one swap added: seconds of a pass over the data before and with it."""

    swap: str
    before: float
    after: float

    @property
    def gain(self) -> float:
        """Seconds that a pass takes less; negative where the swap costs."""
        return self.before - self.after


@dataclass(frozen=True, slots=True)
class Waterfall:
    """The sides of one recipe in the order of its swaps, stock first; sides bear swaps' names."""

    recipe: str
    comparison: Comparison

    @property
    def falls(self) -> tuple[Fall, ...]:
        """One a swap, by the fastest run of each side; a side without times has none."""
        ran = [row for row in self.comparison.rows if row.ran]
        steps = itertools.pairwise(ran)
        return tuple(Fall(after.name, before.least, after.least) for before, after in steps)


def tasks(task: Task, side: Row) -> dict[str, Task]:
    """The sides that take ``side``, which has been measured, apart; empty where it swaps nothing.

    ``task`` is the one that ``side`` was measured with. Beyond ``MOST``, the last swaps are one.
    """
    found = side.facts["swaps"]
    assert isinstance(found, list)
    if not found:
        return {}
    sides = {STOCK: dataclasses.replace(task, recipe=STOCK)}
    for count, name in enumerate(found[:MOST], start=1):
        rest = len(found) - MOST if count == MOST else 0
        label = f"{name} and {rest} more" if rest > 0 else str(name)
        sides[label] = dataclasses.replace(task, swaps=found[: count + max(rest, 0)])
    return sides


def data(found: Waterfall) -> dict[str, object]:
    """JSON-able: every run's time of every step, and what each swap gained."""
    steps = [
        {"swap": fall.swap, "before_seconds": fall.before, "after_seconds": fall.after}
        for fall in found.falls
    ]
    runs = {row.name: list(row.seconds) for row in found.comparison.rows}
    return {"recipe": found.recipe, "steps": steps, "seconds": runs}
