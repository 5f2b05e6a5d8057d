"""Prompts of 64, 256 and 1024 tokens through the Llama shape of ``decode``, the same sides in turn.

A time is seconds until the logits after the prompt.

    python benchmarks/prefill.py [--sides GLOBS] [--threads 2] [--lengths 64 256 1024]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.decode import compare, errors, models, options, prepared
from benchmarks.rounds import alternate, figures

PAIRS = (
    ("auto bf16", "llama.cpp bf16", 0.9),
    ("int8", "llama.cpp Q8_0", 0.9),
    ("int8-dynamic", "llama.cpp Q8_0", 0.9),
    ("int4", "llama.cpp Q4_0", 0.9),
    ("int8 fp32", "llama.cpp Q8_0", 0.9),
    ("int4 fp32", "llama.cpp Q4_0", 0.9),
    ("int8", "auto bf16", 1.0),
    ("int8-dynamic", "auto bf16", 1.0),
    ("int4", "auto bf16", 1.0),
)


def main() -> int:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--lengths", type=int, nargs="*", default=[64, 256, 1024])
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    with models(given.folder) as folder:
        sides = prepared(folder, given.sides)
        methods = {f"prefill {length}": {"tokens": length} for length in given.lengths}
        facts = alternate(sides, methods, runs=given.runs, threads=given.threads)
    far = errors(sides, facts)
    print(f"prefill, {given.threads} threads; error is of the logits after 64 tokens")
    print(f"{'side':16} {'tokens':>6} {'min ms':>9} {'median ms':>9} {'spread':>8}  error")
    for method in methods:
        for side in sides:
            print(f"{side.name:16} {method.split()[1]:>6} ", end="")
            print(f"{figures(side.times[method])}  {far[side.name]:.1e}")
        compare(sides, method, PAIRS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
