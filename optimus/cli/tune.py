"""``optimus tune``: find out what pays on this machine, for ``auto`` to go by from then on."""

from __future__ import annotations

import argparse
import datetime
import json

from rich.console import Console
from rich.table import Table

from optimus.cli.progress import Steps
from optimus.core import costs
from optimus.measure import load
from optimus.measure import tune as tuning
from optimus.measure.tune import Tuned

SECONDS = 120.0


def _seconds(word: str) -> float:
    seconds = float(word)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError("must be more than 0")
    return seconds


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("tune", help="measure what pays on this machine")
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a folder or a hub id; default: usual shapes"
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=SECONDS, metavar="S", help="at most; default: 120"
    )
    parser.add_argument("--json", action="store_true", help="the figures on stdout as JSON")
    parser.set_defaults(func=run)


def _measure(options: argparse.Namespace) -> Tuned:
    with Steps("reading the config") as steps:
        found = tuning.jobs(load.read_config(options.model) if options.model else None)
        steps.expect(len(found))
        return tuning.tune(found, seconds=options.seconds, tick=steps.done)


def _table(tuned: Tuned, kind: str, unit: str) -> Table:
    """A row for each name, a column for each number of rows or keys."""
    figures = [one for one in tuned.figures if (one.kind, one.unit) == (kind, unit)]
    numbers = sorted({one.number for one in figures})
    table = Table("", *map(str, numbers), title=f"times stock by {unit}, {kind}")
    for name in dict.fromkeys(one.name for one in figures):
        found = {one.number: f"{one.ratio:.2f}" for one in figures if one.name == name}
        table.add_row(name, *(found.get(number, "") for number in numbers))
    return table


def _data(tuned: Tuned) -> dict[str, object]:
    return {
        "machine": costs.machine(),
        "table": str(costs.table_path()),
        "ratios": tuned.ratios(),
        "left": [{"job": job, "reason": reason} for job, reason in tuned.left],
    }


def _show(tuned: Tuned, console: Console) -> None:
    for kind, unit in dict.fromkeys((one.kind, one.unit) for one in tuned.figures):
        console.print(_table(tuned, kind, unit))
    for job, reason in tuned.left:
        console.print(f"not measured: {job}: {reason}", markup=False, highlight=False)
    console.print(
        f"{len(tuned.figures)} figures of {costs.machine()}; plans read them from "
        f"{costs.table_path()}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def run(options: argparse.Namespace) -> int:
    """Measure, keep the figures and print them."""
    tuned = _measure(options)
    try:
        costs.record(tuned.ratios(), str(datetime.datetime.now().date()))
    except OSError as error:
        raise load.LoadError(f"cannot write {costs.table_path()}: {error.strerror}.") from error
    console = Console()
    if options.json:
        console.print_json(json.dumps(_data(tuned)))
    else:
        _show(tuned, console)
    return 0
