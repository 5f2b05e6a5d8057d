"""Run by ``test_kill.py``: conversions that are killed, all in one process that stays clean.

``python killed.py MODEL FOLDER SEED TIMES`` forks a child for each conversion of MODEL into
FOLDER/out, kills it at a random moment, looks at what is there, and at last lets one finish.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from optimus.export.convert import convert

SHARD = 150_000


def child(model: str, out: Path) -> int:
    """A process that converts."""
    pid = os.fork()
    if pid == 0:
        convert(model, out, "int8", shard=SHARD)
        os._exit(0)
    return pid


def main(model: str, folder: Path, seed: int, times: int) -> dict[str, object]:
    """How many were killed midway, and how many files the last run found complete."""
    moments = random.Random(seed)
    whole = folder / "whole"
    convert(model, whole, "int8", shard=SHARD)
    start = time.perf_counter()
    os.waitpid(child(model, folder / "timed"), 0)
    lasts = time.perf_counter() - start
    out, killed = folder / "out", 0
    for _ in range(times):
        pid = child(model, out)
        time.sleep(moments.uniform(0, lasts))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if not out.exists():
            killed += 1
            continue
        if names(out) != names(whole):
            raise SystemExit("half of a folder")
        out.rename(folder / f"finished-{killed}-{time.monotonic_ns()}")
    done = convert(model, out, "int8", shard=SHARD)
    return {"killed": killed, "resumed": done.resumed, "left": sorted(names(folder))}


def names(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(p.name for p in folder.iterdir())


if __name__ == "__main__":
    found = main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    sys.stdout.write(json.dumps(found))
