"""The shapes that generation runs in, few enough to compile each of them ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Graph:
    """One computation in one shape: ``length`` tokens a row that see the cache's first ``window``.

    A decode has a length of 1.
    """

    kind: Kind
    batch: int
    length: int
    window: int

    @property
    def name(self) -> str:
        """As compilers, profilers and bars show it."""
        return f"{self.kind}_{self.batch}x{self.length}_in_{self.window}"


@dataclass(frozen=True, slots=True)
class Section:
    """Columns ``begin`` to ``end`` of a prompt, and the bucket and the window that they run in."""

    begin: int
    end: int
    length: int
    window: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """Which prompt lengths and batches are compiled, and how many tokens a cache has room for.

    A prompt longer than the longest bucket goes section by section. Each bucket is also a window:
    the beginning of the cache that attention looks at. Beyond the longest they double up to
    ``room``, so that there are two graphs for each window: the prefill that ends in it, and the
    decode. Raises ``ValueError`` where a number is not a positive whole one.

    >>> Buckets(room=2048).windows
    (128, 256, 384, 512, 1024, 2048)
    >>> [(s.end - s.begin, s.length, s.window) for s in Buckets().sections(1500)]
    [(476, 512, 512), (512, 512, 1024), (512, 512, 2048)]
    """

    lengths: tuple[int, ...] = (128, 256, 384, 512)
    batches: tuple[int, ...] = (1,)
    room: int = 2048

    def __post_init__(self) -> None:
        for name in ("lengths", "batches"):
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
            _demand_counts(name, getattr(self, name))
        _demand_counts("room", (self.room,))
        if self.lengths[-1] > self.room:
            raise ValueError(
                f"a prompt bucket of {self.lengths[-1]} tokens does not fit a cache with room for "
                f"{self.room}. Give Buckets a larger room, or shorter lengths."
            )

    def within(self, most: int | None) -> Buckets:
        """These, of a model that knows no more than ``most`` positions; None for any number."""
        if most is None or most >= self.room:
            return self
        fitting = tuple(length for length in self.lengths if length <= most)
        return replace(self, lengths=fitting or (most,), room=most)

    @property
    def windows(self) -> tuple[int, ...]:
        """The beginnings of the cache that attention may look at, in ascending order."""
        found = list(self.lengths)
        while found[-1] < self.room:
            found.append(min(2 * found[-1], self.room))
        return tuple(found)

    def window(self, end: int) -> int:
        """The least window that ``end`` tokens fit in."""
        return next(one for one in self.windows if one >= end)

    def batch(self, rows: int) -> int | None:
        """The least batch bucket that so many rows fit in; None where there is none."""
        return next((one for one in self.batches if one >= rows), None)

    def sections(self, prompt: int) -> Iterator[Section]:
        """A prompt of so many tokens, in order. The first may be shorter than its bucket: what is
        behind it is overwritten by the next, and so the others are full and the cache has no gap.
        """
        longest = self.lengths[-1]
        end = (prompt - 1) % longest + 1
        length = next(one for one in self.lengths if one >= end)
        yield Section(0, end, length, length)
        for begin in range(end, prompt, longest):
            yield Section(begin, begin + longest, longest, self.window(begin + longest))

    def graphs(self) -> Iterator[Graph]:
        """Everything that can run: for each batch and window a prefill and a decode."""
        for batch in self.batches:
            for window in self.windows:
                yield Graph("prefill", batch, min(window, self.lengths[-1]), window)
                yield Graph("decode", batch, 1, window)


def _demand_counts(name: str, values: Iterable[object]) -> None:
    found = list(values)
    if not found or not all(type(one) is int and one > 0 for one in found):
        raise ValueError(f"Buckets takes whole numbers above 0 for {name}, and got {found}.")
