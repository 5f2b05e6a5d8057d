"""``optimus export``: a model as a graph that other programs run, compared before it is kept."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from optimus.cli.progress import Steps
from optimus.export import exporting
from optimus.export.exporting import Report
from optimus.export.targets import TARGETS
from optimus.measure import load

EXAMPLE = "example: optimus export ./model ./model-onnx --to onnx"


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "export", help="write a graph that other programs run", epilog=EXAMPLE
    )
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    parser.add_argument("out", metavar="OUT", type=Path, help="a new folder")
    parser.add_argument("--to", required=True, choices=TARGETS, help="what is to run it")
    parser.add_argument("--json", action="store_true", help="the report on stdout as JSON")
    parser.set_defaults(func=run)


def _export(options: argparse.Namespace) -> Report:
    target = TARGETS[options.to]
    with Steps("reading the model") as steps:
        steps.expect(exporting.STEPS)
        # All that can be wrong with the arguments, before anything is loaded.
        target.demand()
        exporting.demand_new(options.out, Path(options.model))
        model = load.load_model(options.model)
        steps.done("read the model")
        return exporting.export(
            model,
            options.out,
            target,
            beside=lambda folder: _beside(options.model, folder),
            tick=steps.done,
        )


def _beside(source: str, folder: Path) -> None:
    """The tokenizer, where the model has one: the graph is of no use to text without it."""
    try:
        tokenizer = load.load_tokenizer(source)
    except load.LoadError:
        return
    tokenizer.save_pretrained(str(folder))


def _show(report: Report, console: Console) -> None:
    table = Table("texts x tokens", "relative error", "ms", "stock ms", title=report.target)
    for one in report.figures:
        times = (f"{one.seconds * 1e3:.2f}", f"{one.stock_seconds * 1e3:.2f}")
        table.add_row(one.size, f"{one.error:.1e}", *times)
    console.print(table)
    claims = ", ".join(f"{count} {name}" for name, count in report.claims.items())
    size = f"{report.bytes / 1e6:.1f} MB (weights {report.weights_bytes / 1e6:.1f} MB)"
    for line in (
        f"{report.architecture} -> {report.folder}: {size}, written in {report.seconds:.1f} s.",
        f"swapped before: {claims or 'nothing'}.",
        f"verified: largest relative error {report.error:.1e}, tolerance {report.tolerance:.0e}.",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def run(options: argparse.Namespace) -> int:
    """Export and print the report; 1 where the answers differ, by ``VerificationError``."""
    report = _export(options)
    console = Console()
    if options.json:
        console.print_json(json.dumps(report.data()))
    else:
        _show(report, console)
    return 0
