"""Decoding a Llama shape of 1.1 B parameters: stock, optimus's recipes and llama.cpp in turn.

Random weights, batch 1, greedy. A time is seconds a token after the first, the least and the
median of the runs; the share is that of the floor: bytes of weights read a token over the
bandwidth that reading one large block reaches in the same run.

    python benchmarks/decode.py [--sides GLOBS] [--threads 2] [--new 128] [--folder KEPT]
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import tempfile
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import llama  # noqa: E402
from benchmarks.rounds import Side, alternate, figures  # noqa: E402

STOCK, PEER = "benchmarks.llama:Stock", "benchmarks.llama:LlamaCpp"
# What every side is: factory, options, and bits a weight that decoding reads.
BLOCKS, HEAD = 968_884_224, 65_536_000
SIDES: dict[str, tuple[str, dict[str, Any], float]] = {
    "stock fp32": (STOCK, {"dtype": "float32"}, 4 * (BLOCKS + HEAD)),
    "stock bf16": (STOCK, {}, 2 * (BLOCKS + HEAD)),
    "auto fp32": (STOCK, {"dtype": "float32", "recipe": "auto"}, 4 * (BLOCKS + HEAD)),
    "auto bf16": (STOCK, {"recipe": "auto"}, 2 * (BLOCKS + HEAD)),
    "int8": (STOCK, {"recipe": "int8"}, 8.5 / 8 * (BLOCKS + HEAD)),
    "int8-dynamic": (STOCK, {"recipe": "int8-dynamic"}, BLOCKS + HEAD),
    "int4": (STOCK, {"recipe": "int4"}, 4.5 / 8 * BLOCKS + 8.5 / 8 * HEAD),
    "int8 fp32": (STOCK, {"dtype": "float32", "recipe": "int8"}, 8.5 / 8 * (BLOCKS + HEAD)),
    "int4 fp32": (
        STOCK,
        {"dtype": "float32", "recipe": "int4"},
        4.5 / 8 * BLOCKS + 8.5 / 8 * HEAD,
    ),
    "llama.cpp bf16": (PEER, {"file": "bf16.gguf"}, 2 * (BLOCKS + HEAD)),
    "llama.cpp Q8_0": (PEER, {"file": "q8_0.gguf"}, 8.5 / 8 * (BLOCKS + HEAD)),
    "llama.cpp Q4_0": (PEER, {"file": "q4_0.gguf"}, 4.5 / 8 * BLOCKS + 6.5625 / 8 * HEAD),
}
PAIRS = (
    ("auto bf16", "llama.cpp bf16", 1.0),
    ("int8", "llama.cpp Q8_0", 1.05),
    ("int8 fp32", "llama.cpp Q8_0", 1.05),
    ("int4", "llama.cpp Q4_0", 1.15),
    ("int4 fp32", "llama.cpp Q4_0", 1.15),
)


def options(description: str | None) -> argparse.ArgumentParser:
    """What both benchmarks are asked."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sides", default="*", help="names of sides, as globs with commas")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the models are kept; else they go")
    return parser


def prepared(folder: Path, globs: str) -> list[Side]:
    """The sides asked for, their models written."""
    names = [n for n in SIDES if any(fnmatchcase(n, glob) for glob in globs.split(","))]
    checkpoint = llama.write_checkpoint(folder)
    sides = []
    for name in names:
        factory, given, _ = SIDES[name]
        if factory == STOCK:
            given = {**given, "folder": str(checkpoint)}
        else:
            given = {"file": str(_gguf(folder, given["file"]))}
        sides.append(Side(name, factory, given))
    return sides


def _gguf(folder: Path, name: str) -> Path:
    whole = folder / "bf16.gguf"
    if not whole.exists():
        llama.write_gguf(folder, whole)
    kinds = {"q8_0.gguf": llama.Q8_0, "q4_0.gguf": llama.Q4_0}
    return llama.quantized(whole, folder / name, kinds[name]) if name in kinds else whole


@contextlib.contextmanager
def models(folder: Path | None) -> Any:
    """The folder of the models."""
    if folder is not None:
        folder.mkdir(exist_ok=True, parents=True)
        yield folder
    else:
        with tempfile.TemporaryDirectory() as made:
            yield Path(made)


def bandwidth(threads: int) -> float:
    """Bytes a second of reading half a gigabyte, the best of some tries."""
    import torch

    torch.set_num_threads(threads)
    block = torch.ones(1 << 27)
    best = 0.0
    for _ in range(8):
        start = time.perf_counter()
        block.sum()
        best = max(best, block.nbytes / (time.perf_counter() - start))
    return best


def errors(sides: list[Side], answers: dict[str, Any]) -> dict[str, float]:
    """How far each side's logits are from the first side's."""
    import torch

    rows = {side.name: torch.tensor(answers[side.name]["logits"]) for side in sides}
    first = rows[sides[0].name]
    return {name: float((row - first).norm() / first.norm()) for name, row in rows.items()}


def main() -> int:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    with models(given.folder) as folder:
        sides = prepared(folder, given.sides)
        speed = bandwidth(given.threads)
        methods = {"decode": {"tokens": given.prompt, "new": given.new}}
        facts = alternate(sides, methods, runs=given.runs, threads=given.threads)
    far = errors(sides, facts)
    print(f"decode, prompt {given.prompt}, {given.new} new, {given.threads} threads, ", end="")
    print(f"{speed / 1e9:.1f} GB/s")
    print(f"{'side':16} {'min ms':>9} {'median ms':>9} {'spread':>8} {'floor':>8}  error     GB")
    for side in sides:
        times = side.times["decode"]
        share = SIDES[side.name][2] / speed / min(times)
        resident = facts[side.name]["resident"] / 1e9
        print(f"{side.name:16} {figures(times)} {100 * share:6.0f} %  ", end="")
        print(f"{far[side.name]:.1e}  {resident:.2f}")
    compare(sides, "decode", PAIRS)
    return 0


def compare(sides: list[Side], method: str, pairs: tuple[tuple[str, str, float], ...]) -> None:
    """Least against least of the pairs that ran."""
    times = {side.name: min(side.times.get(method, [math.nan])) for side in sides}
    for mine, other, asked in pairs:
        if mine in times and other in times:
            ratio = times[mine] / times[other]
            print(f"{method}: {mine} takes {ratio:.2f}x the time of {other} (asked: {asked}x)")


if __name__ == "__main__":
    sys.exit(main())
