"""Prompts of Llama shapes on a GPU: bf16 and fp8, compiled by block, beside transformers eager.

python benchmarks/cuda_prefill.py [--sizes 1B,3B,8B] [--tokens 2048] [--rows 4]
python benchmarks/cuda_prefill.py --device cpu --tiny
"""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import gpu
from benchmarks.rounds import Side

ASKED = 1.3


def sides(device: str) -> dict[str, list[list[str]]]:
    """The stages of every side; nothing is compiled on a CPU."""
    compiled = [["cuda.compile"]] if device == "cuda" else []
    return {"stock": [], "bf16": [["*"], *compiled], "fp8": [["*.fp8"], ["*"], *compiled]}


def measure(given: Any, size: str) -> list[dict[str, Any]]:
    """A row a side."""
    rows: list[dict[str, Any]] = []
    orders = {"prefill": {"tokens": given.tokens, "rows": given.rows}}
    for name, stages in sides(given.device).items():
        if not any(fnmatchcase(name, one) for one in given.sides.split(";")):
            continue
        asked = {"size": size, "device": given.device, "stages": stages}
        found = gpu.in_turn(Side(name, gpu.FACTORY, asked), orders, given.runs)
        if "refused" in found:
            print(f"{size:5} {name:6} {found['refused']}")
            rows.append({"size": size, "side": name, **found})
            continue
        times, logits = found["times"]["prefill"], found["logits"]
        far = gpu.distance(logits, rows[0]["logits"] if rows else logits)
        rows.append({"size": size, "side": name, "times": times, "error": far, "logits": logits})
        print(f"{size:5} {name:6} {1000 * min(times):9.2f} ms  error {far:.1e}", flush=True)
    return rows


def main() -> int:
    """Measure and print."""
    parser = gpu.options(__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=4)
    given = parser.parse_args()
    if given.tiny:
        given.sizes, given.tokens, given.rows, given.runs = "tiny", 32, 2, 1
    every: list[dict[str, Any]] = []
    for size in given.sizes.split(","):
        rows = measure(given, size)
        least = {row["side"]: min(row["times"]) for row in rows if "times" in row}
        if {"bf16", "fp8"} <= least.keys():
            ratio = least["bf16"] / least["fp8"]
            print(f"{size}: fp8 is {ratio:.2f}x bf16 (asked: {ASKED}x)")
        every += [{key: one for key, one in row.items() if key != "logits"} for row in rows]
    gpu.record("cuda_prefill", given.device, every, tokens=given.tokens, prompts=given.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
