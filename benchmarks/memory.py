"""Resident memory of the Llama shape of ``decode``: every recipe and every place of the originals.

Each in its own process, after the transform and one decoded token, beside stock bf16.

    python benchmarks/memory.py [--recipes int4,int8] [--folder KEPT]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import llama
from benchmarks.decode import STOCK, models
from benchmarks.rounds import Side

KEEPS = ("host", "disk", "source", "none")


def resident(options: dict[str, Any]) -> float:
    """Gigabytes in RAM after one decoded token."""
    side = Side("memory", STOCK, options)
    side.start(1)
    try:
        side.call("decode", tokens=8, new=1)
        return float(side.call("facts")["resident"]) / 1e9
    finally:
        side.stop()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--recipes", default="auto,int8,int8-dynamic,int4")
    parser.add_argument("--keeps", default=",".join(KEEPS))
    parser.add_argument("--folder", type=Path, help="where the model is kept; else it goes")
    given = parser.parse_args()
    with models(given.folder) as folder:
        checkpoint = {"folder": str(llama.write_checkpoint(folder))}
        stock = resident(checkpoint)
        print(f"{'recipe':14} {'keep':8} {'GB':>6}  of stock bf16")
        print(f"{'stock':14} {'':8} {stock:6.2f}  1.00", flush=True)
        for recipe in given.recipes.split(","):
            # Without rounding there is nothing to keep.
            for keep in given.keeps.split(",") if recipe != "auto" else ("host",):
                gigabytes = resident({**checkpoint, "recipe": recipe, "keep": keep})
                share = gigabytes / stock
                print(f"{recipe:14} {keep:8} {gigabytes:6.2f}  {share:.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
