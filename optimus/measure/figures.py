"""The figures of a comparison, as data: times, memory, and how far the answers drifted."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from optimus.measure.answers import SIMILARITY
from optimus.measure.side import STOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every side did in one run; ``judge`` names what their answers are judged by."""

    model: str
    texts: int
    batch: int
    tokens: int
    places: int
    length: int
    judge: str = SIMILARITY

    @property
    def real_share(self) -> float:
        """Share of real tokens among all places of the padded batches."""
        return self.tokens / self.places


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One side: its times, or why it has none (``refused`` or ``unverified``).

    ``quality``: what ``Work.judge`` names, of the answers; a perplexity is over ``scored`` tokens.
    """

    name: str
    seconds: tuple[float, ...] = ()
    error: float | None = None
    quality: float = math.nan
    scored: int = 0
    loaded_bytes: int = 0
    peak_bytes: int = 0
    threads: int = 0
    allocator: str = ""
    facts: dict[str, object] = field(default_factory=dict)
    refused: str = ""
    unverified: str = ""

    @property
    def ran(self) -> bool:
        """Whether there are times."""
        return bool(self.seconds)

    @property
    def least(self) -> float:
        """The fastest run: the one that the rest of the machine disturbed least."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The middle run."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Slowest over fastest run, less one."""
        return max(self.seconds) / self.least - 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """All sides, stock first, on one machine and one piece of work."""

    work: Work
    rows: tuple[Row, ...]
    machine: dict[str, object]

    @property
    def stock(self) -> Row:
        """The side that the others are compared with."""
        return next(row for row in self.rows if row.name == STOCK)

    @property
    def best(self) -> Row | None:
        """The fastest side beside stock whose answers may be used."""
        fit = [row for row in self.rows if row.ran and not row.unverified and row.name != STOCK]
        return max(fit, key=self.ratio, default=None)

    def ratio(self, row: Row) -> float:
        """How many times faster than stock, fastest run against fastest run."""
        return self.stock.least / row.least

    def tokens_per_second(self, row: Row) -> float:
        """Real tokens; padding is no work done."""
        return self.work.tokens / row.least

    def sequences_per_second(self, row: Row) -> float:
        """Texts a second in the fastest run."""
        return self.work.texts / row.least
