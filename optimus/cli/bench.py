"""``optimus bench``: stock against each recipe, on real text, with the error beside the speed."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from rich.console import Console

from optimus.cli.plan import add_attention
from optimus.cli.progress import Steps
from optimus.core.errors import RegistryError
from optimus.core.recipes import RECIPES
from optimus.measure import alternate, load, page, report, text, waterfall
from optimus.measure.figures import Comparison
from optimus.measure.side import STOCK, Task
from optimus.measure.waterfall import Waterfall

DEFAULT_TEXTS = 64


def _count(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("bench", help="time recipes against stock, each in its process")
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    parser.add_argument(
        "--recipe", action="append", metavar="R", help="may be given again; default: auto"
    )
    parser.add_argument(
        "--data", type=Path, metavar="FILE",
        help="one text a line, or documents between blank lines; default: "
        f"{DEFAULT_TEXTS} docstrings of the standard library",
    )  # fmt: skip
    parser.add_argument("--batch", type=_count, default=16, metavar="N", help="texts a batch")
    parser.add_argument(
        "--length", type=_count, default=256, metavar="N", help="most tokens a text"
    )
    parser.add_argument("--runs", type=_count, default=5, metavar="N", help="timed runs a side")
    add_attention(parser)
    parser.add_argument("--json", action="store_true", help="the figures on stdout as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="FILE",
        help="write a self-contained page with plots, and the gain measured swap by swap",
    )  # fmt: skip
    parser.set_defaults(func=run)


def _tasks(options: argparse.Namespace) -> dict[str, Task]:
    """A task a side, stock first. Everything that can be wrong is found before a process starts."""
    recipes = dict.fromkeys(options.recipe or ["auto"])
    for name in recipes:
        if name not in RECIPES:
            raise RegistryError(f"unknown recipe {name!r}; known are {', '.join(sorted(RECIPES))}")
    load.read_config(options.model)
    texts = text.read_texts(options.data) if options.data else text.docstrings(DEFAULT_TEXTS)
    sizes = {"batch": options.batch, "length": options.length}
    task = Task(model=options.model, texts=texts, attention=options.attention, **sizes)
    return {name: dataclasses.replace(task, recipe=name) for name in (STOCK, *recipes)}


def _measure(options: argparse.Namespace) -> tuple[Comparison, Waterfall | None]:
    """The sides, and for a page the swaps of the fastest one by one."""
    with Steps("reading the texts") as steps:
        tasks = _tasks(options)
        total = alternate.steps(tasks, options.runs)
        steps.expect(total)
        comparison = alternate.compare(tasks, runs=options.runs, tick=steps.done)
        if options.html is None or comparison.best is None:
            return comparison, None
        best = comparison.best
        parts = waterfall.tasks(tasks[best.name], best)
        if not parts:
            return comparison, None
        steps.expect(total + alternate.steps(parts, options.runs))
        apart = alternate.compare(parts, runs=options.runs, tick=steps.done)
    return comparison, Waterfall(best.name, apart)


def _show(comparison: Comparison, console: Console) -> None:
    console.print(report.table(comparison))
    for line in (*report.notes(comparison), report.conditions(comparison)):
        console.print(line, markup=False, highlight=False)
    console.print(report.verdict(comparison), style="bold", markup=False, highlight=False)


def _write(file: Path, content: str) -> None:
    try:
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise load.LoadError(f"cannot write {file}: {error.strerror}.") from error


def run(options: argparse.Namespace) -> int:
    """Measure and print; 1 where a side ran and its answers were not verified."""
    comparison, fallen = _measure(options)
    if options.html:
        _write(options.html, page.html(comparison, fallen))
    console = Console()
    if options.json:
        found = report.data(comparison)
        if fallen:
            found["waterfall"] = waterfall.data(fallen)
        console.print_json(json.dumps(found))
    else:
        _show(comparison, console)
    return int(any(row.unverified for row in comparison.rows))
