"""Sides that take turns, each alone in its process: what ``decode`` and ``prefill`` are made of.

A side is ``"module:function"`` with keyword arguments. The function returns an object; an order
names one of its methods, and the answer is what that returns. Between orders a side sleeps on
stdin. Nothing here imports torch: a peer's process is the peer's alone.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass
class Side:
    """One process."""

    name: str
    factory: str
    options: dict[str, Any] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)

    def start(self, threads: int) -> None:
        """Start it, and wait until it is ready."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.rounds"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        self.ready = self.ask({"factory": self.factory, "options": self.options})

    def ask(self, order: dict[str, Any]) -> Any:
        """The answer to one order; ``RuntimeError`` where the process ended instead."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: its process ended with {self.process.wait()}")
        return json.loads(line)

    def call(self, method: str, **options: Any) -> Any:
        """What that method of the side returns."""
        return self.ask({"method": method, "options": options})

    def stop(self) -> None:
        """End the process by closing its stdin."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


def alternate(
    sides: list[Side], methods: dict[str, dict[str, Any]], *, runs: int, threads: int
) -> dict[str, Any]:
    """Time every method of every side, in turn: seconds go into ``times``.

    The methods are named ``"method label"``. Returns each side's ``facts``.
    """
    with ExitStack() as stack:
        for side in sides:
            side.start(threads)
            stack.callback(side.stop)
            print(f"{side.name}: ready", file=sys.stderr, flush=True)
        for name, options in methods.items():
            for side in sides:
                side.call(name.split()[0], **options)  # warm up
            for _ in range(runs):
                for side in sides:
                    seconds = side.call(name.split()[0], **options)
                    side.times.setdefault(name, []).append(seconds)
        return {side.name: {**side.call("facts"), **_logits(side)} for side in sides}


def _logits(side: Side) -> dict[str, Any]:
    return {"logits": side.call("logits", tokens=64)}


def figures(times: list[float], *, scale: float = 1000) -> str:
    """Minimum, median and spread."""
    least, middle = min(times), statistics.median(times)
    return f"{scale * least:9.2f} {scale * middle:9.2f} {100 * (max(times) / least - 1):6.0f} %"


def serve() -> None:
    """Build the side of the first line, then answer orders until stdin closes."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    runner = None
    for line in sys.stdin:
        order = json.loads(line)
        if runner is None:
            module, _, function = order["factory"].partition(":")
            runner = getattr(importlib.import_module(module), function)(**order["options"])
            answer = True
        else:
            answer = getattr(runner, order["method"])(**order["options"])
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


if __name__ == "__main__":
    serve()
