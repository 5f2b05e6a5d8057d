"""A bar on stderr for work in steps that are known once the work has begun."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Steps:
    """The bar, for a ``with`` block; it leaves nothing on the screen."""

    def __init__(self, beginning: str) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task(beginning, total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def expect(self, total: int) -> None:
        """So many steps there are."""
        self._progress.update(self._task, total=total)

    def told(self, done: int, total: int, what: str) -> None:
        """Where the work stands, as ``optimus.generation.warm_up`` tells it."""
        self._progress.update(self._task, completed=done, total=total, description=what)

    def done(self, what: str) -> None:
        """One step more; ``what`` it was."""
        self._progress.update(self._task, advance=1, description=what)
