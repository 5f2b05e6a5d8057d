"""``optimus verify``: two folders or hub ids, the same answers?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from optimus.measure import compare
from optimus.measure.compare import Comparison

EXAMPLE = "example: optimus verify ./model ./model-onnx --data texts.txt"
UNLIKE = 1


def _tolerance(word: str) -> float:
    number = float(word)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return number


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("verify", help="do two models answer the same?", epilog=EXAMPLE)
    parser.add_argument("first", metavar="A", help="a folder or a hub id; its tokenizer reads")
    parser.add_argument("second", metavar="B", help="another, or what `optimus export` wrote")
    parser.add_argument(
        "--data", type=Path, metavar="FILE",
        help="one text a line, or documents between blank lines; default: "
        f"{compare.TEXTS} docstrings of the standard library",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", type=_tolerance, default=compare.TOLERANCE, metavar="E",
        help=f"largest relative error of an output; default: {compare.TOLERANCE:.0e}",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(func=run)


def _finite(value: Any) -> Any:
    """JSON has no infinity, which is the error of an output that is missing."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def data(found: Comparison) -> dict[str, object]:
    """The comparison as JSON-able data; None is an error that is no number."""
    return {"ok": found.ok, **_finite(dataclasses.asdict(found))}


def _table(title: str, errors: dict[str, float]) -> Table:
    table = Table(title, "relative error")
    table.columns[0].overflow = "fold"
    for name, error in errors.items():
        table.add_row(name, f"{error:.1e}")
    return table


def _show(found: Comparison, console: Console) -> None:
    console.print(_table("output", found.outputs))
    if found.layers:
        console.print(_table("worst layers, by what they add", found.layers))
    lines = []
    if found.agreement is not None:
        lines.append(f"greedy words that are the same: {found.agreement:.1%}")
    if found.perplexities is not None:
        lines.append("perplexity: {:.4g} and {:.4g}".format(*found.perplexities))
    verdict = "the same answers" if found.ok else found.reason or "not the same answers"
    lines.append(f"{verdict}; tolerance {found.tolerance:.0e}, on {found.data}.")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def run(options: argparse.Namespace) -> int:
    """Compare and print; 1 where an output is further off than the tolerance."""
    with Console(stderr=True).status(f"comparing {options.first} and {options.second}"):
        found = compare.compare(
            options.first, options.second, data=options.data, tolerance=options.tolerance
        )
    console = Console()
    if options.json:
        console.print_json(json.dumps(data(found)))
    else:
        _show(found, console)
    return 0 if found.ok else UNLIKE
