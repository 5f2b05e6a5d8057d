"""Several sides in turn: A B A B … in time, so that a slow minute of the machine hits them all.

The parent holds no model. Each side is a process of its own (see ``side``); only one works at a
time, and all of them end when the block ends, however it ends.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Self

from optimus.core.errors import OptimusError
from optimus.measure import machine
from optimus.measure.answers import JUDGES, relative_error
from optimus.measure.figures import Comparison, Row, Work
from optimus.measure.load import LoadError
from optimus.measure.side import STOCK, Task, encode

Tick = Callable[[str], None]


class SideError(OptimusError, RuntimeError):
    """A side's process died without saying why in the protocol."""


class Side:
    """One process that serves one task."""

    def __init__(self, name: str, task: Task, *, folder: Path) -> None:
        folder.mkdir()
        self.name = name
        self.seconds: list[float] = []
        self.ready: dict[str, Any] = {}
        self.outputs = folder
        self._errors: IO[bytes] = (folder / "stderr").open("w+b")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "optimus.measure.side"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            process_group=0,  # a terminal's Ctrl-C is ours to handle, and ends the sides in order
        )
        self._send(encode(task))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _send(self, line: str) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None

    def _death(self) -> SideError:
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        code = self._process.wait()
        last = said[-1] if said else f"exit status {code}, no message"
        return SideError(f"the side {self.name!r} died: {last}")

    def hear(self) -> dict[str, Any]:
        """The next reply. ``SideError`` where the process ended instead."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise self._death()
        reply: dict[str, Any] = json.loads(line)
        if reply["event"] == "failed":
            raise LoadError(reply["reason"])
        return reply

    def run(self) -> None:
        """One timed pass over every batch."""
        self._send(json.dumps({"do": "run"}))
        self.seconds.append(self.hear()["seconds"])

    def finish(self) -> dict[str, Any]:
        """Have the outputs written into ``outputs``; peak memory in bytes, and a perplexity."""
        self._send(json.dumps({"do": "finish", "folder": str(self.outputs)}))
        return self.hear()


def _row(side: Side) -> Row:
    ready = side.ready
    if ready["event"] != "ready":
        return Row(name=side.name, **{ready["event"]: ready["reason"]})
    return Row(
        name=side.name,
        seconds=tuple(side.seconds),
        facts=ready["facts"],
        loaded_bytes=ready["loaded_bytes"],
        threads=ready["threads"],
        allocator=ready["allocator"],
    )


def _judge(side: Side, stock: Side) -> Row:
    """The row of a side that ran, with its memory and its error. Its outputs are deleted."""
    said = side.finish()
    error = relative_error(side.outputs, stock.outputs)
    judge = JUDGES.get(side.ready["facts"]["judge"])
    quality = said["perplexity"] if judge is None else judge(side.outputs, stock.outputs)
    if side is not stock:
        for path in side.outputs.glob("*.safetensors"):
            path.unlink()
    reason = "" if math.isfinite(error) else "its outputs hold NaN or infinity."
    return dataclasses.replace(
        _row(side),
        peak_bytes=said["peak_bytes"],
        error=error,
        quality=quality,
        scored=said.get("scored", 0),
        unverified=reason,
    )


def _work(task: Task, facts: dict[str, Any]) -> Work:
    return Work(
        model=task.model,
        texts=len(task.texts),
        batch=task.batch,
        tokens=facts["tokens"],
        places=facts["places"],
        length=facts["length"],
        judge=facts["judge"],
    )


def steps(tasks: dict[str, Task], runs: int) -> int:
    """How often ``compare`` ticks where no side is refused."""
    return len(tasks) * (runs + 2)


def compare(tasks: dict[str, Task], *, runs: int, tick: Tick = lambda _: None) -> Comparison:
    """Time every task ``runs`` times, in turn. One must be named ``"stock"`` and comes first.

    ``tick`` is told what has just been finished.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = []
        for number, (name, task) in enumerate(tasks.items()):
            side = stack.enter_context(Side(name, task, folder=folder / str(number)))
            side.ready = side.hear()
            sides.append(side)
            tick(f"{name}: loaded")
        running = [side for side in sides if side.ready["event"] == "ready"]
        for _ in range(runs):
            for side in running:
                side.run()
                tick(f"{side.name}: timed")
        rows = []
        for side in sides:
            rows.append(_judge(side, sides[0]) if side in running else _row(side))
            tick(f"{side.name}: compared")
        work = _work(tasks[STOCK], sides[0].ready["facts"])
    return Comparison(work, tuple(rows), machine.describe())
