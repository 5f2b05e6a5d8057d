"""Prompts of 64, 256 and 1024 tokens through the Llama shape of ``decode``, the same sides in turn.

A time is seconds until the logits after the prompt. ``--ragged`` adds a batch of so many prompts
that are as long as the docstrings of the standard library, up to 256 tokens; llama.cpp takes them
one after the other.

    python benchmarks/prefill.py [--sides GLOBS] [--threads 2] [--lengths 64 256 1024] [--ragged 8]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

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


# English makes some four tokens of three words.
TOKENS_A_WORD, LONGEST = 4 / 3, 256


def ragged_lengths(count: int) -> list[int]:
    """How many tokens so many docstrings have."""
    from optimus.measure.text import docstrings

    words = (len(text.split()) for text in docstrings(count))
    return [min(LONGEST, round(TOKENS_A_WORD * number)) for number in words]


def main() -> int:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--lengths", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--ragged", type=int, metavar="PROMPTS", help="a batch of unequal prompts")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    with models(given.folder) as folder:
        sides = prepared(folder, given.sides)
        methods: dict[str, Any] = {f"prefill {n}": {"tokens": n} for n in given.lengths}
        if given.ragged:
            lengths = ragged_lengths(given.ragged)
            methods[f"ragged {sum(lengths)}"] = {"lengths": lengths}
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
