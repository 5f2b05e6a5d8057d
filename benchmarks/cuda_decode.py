"""Decoding Llama shapes of 1, 3 and 8 B on a GPU, batch 1, greedy, in bf16, int8 and int4.

Beside them transformers eager, and its own compile path (``cache_implementation="static"``). A time
is seconds a token after the first, the least of the runs; the share is that of the bandwidth that
copying reaches: bytes of weights read a token over the time. The error is that of the logits of a
prompt, against stock.

    python benchmarks/cuda_decode.py [--sizes 1B,3B,8B] [--sides GLOBS] [--new 128]
    python benchmarks/cuda_decode.py --device cpu --tiny
"""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import gpu
from benchmarks.rounds import Side

# What is asked of one side against another: times as fast.
PAIRS = (("bf16", "stock", 4.0), ("int8", "bf16", 1.6), ("int4", "bf16", 2.0))


def sides(device: str) -> dict[str, dict[str, Any]]:
    """The options of every side; a CPU has static shapes by its own pass."""
    static = "static.cuda" if device == "cuda" else "static.eager"
    return {
        "stock": {"stages": []},
        "stock static": {"stages": [], "cache": "static"},
        "bf16": {"stages": [[static], ["*"]]},
        "bf16 graphs": {"stages": [["static.cuda-graphs"], ["*"]]},
        "int8": {"stages": [[static], ["*.int8"], ["*"]]},
        "int4": {"stages": [[static], ["*.int4"], ["*"]]},
    }


def measure(given: Any, size: str, speed: float) -> list[dict[str, Any]]:
    """A row a side."""
    rows: list[dict[str, Any]] = []
    orders = {"decode": {"tokens": 64, "new": given.new}}
    for name, how in sides(given.device).items():
        if not any(fnmatchcase(name, one) for one in given.sides.split(";")):
            continue
        side = Side(name, gpu.FACTORY, {"size": size, "device": given.device, **how})
        found = gpu.in_turn(side, orders, given.runs)
        row: dict[str, Any] = {"size": size, "side": name}
        if "refused" in found:
            print(f"{size:5} {name:13} {found['refused']}")
            rows.append({**row, **found})
            continue
        times = found["times"]["decode"]
        row |= {"times": times, "read": found["read"], "peak": found["peak"]}
        row["share"] = found["read"] / min(times) / speed
        logits = found["logits"]
        stock = rows[0]["logits"] if rows else logits
        row["error"] = gpu.distance(logits, stock)
        rows.append({**row, "logits": logits})
        print(
            f"{size:5} {name:13} {1000 * min(times):9.3f} ms {row['share']:6.1%}"
            f"  error {row['error']:.1e}  {found['peak'] / 1e9:6.1f} GB",
            flush=True,
        )
    return rows


def compare(rows: list[dict[str, Any]]) -> None:
    """Least against least."""
    least = {row["side"]: min(row["times"]) for row in rows if "times" in row}
    for mine, other, asked in PAIRS:
        if mine in least and other in least:
            ratio = least[other] / least[mine]
            print(f"{rows[0]['size']}: {mine} is {ratio:.2f}x {other} (asked: {asked}x)")


def main() -> int:
    """Measure and print."""
    parser = gpu.options(__doc__)
    parser.add_argument("--new", type=int, default=128)
    given = parser.parse_args()
    if given.tiny:
        given.sizes, given.new, given.runs = "tiny", 4, 1
    speed = gpu.bandwidth(given.device, tiny=given.tiny)
    print(f"prompt 64, {given.new} new, copying {speed / 1e9:.1f} GB/s")
    every: list[dict[str, Any]] = []
    for size in given.sizes.split(","):
        rows = measure(given, size, speed)
        compare(rows)
        every += [{key: one for key, one in row.items() if key != "logits"} for row in rows]
    gpu.record("cuda_decode", given.device, every, copy_bytes_a_second=speed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
