"""``optimus convert``: a model folder in, a smaller or faster one out, and nothing overwritten."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from rich.console import Console

from optimus.cli.progress import Steps
from optimus.core.recipes import RECIPES
from optimus.export import convert
from optimus.export.outline import DTYPES

EXAMPLE = """example:
  optimus convert MODEL OUT --recipe int8
"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "convert",
        help="write a model in fewer bits, for optimus and others",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    parser.add_argument("out", metavar="OUT", type=Path, help="a new folder")
    parser.add_argument(
        "--recipe", default="auto", metavar="R", help=f"one of {', '.join(RECIPES)}"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of weights that are not rounded")
    parser.add_argument(
        "--shards", metavar="SIZE", help="most bytes a file, such as 2GB; default: as in MODEL"
    )
    parser.add_argument("--json", action="store_true", help="what was done, for programs")
    parser.set_defaults(func=run)


def run(options: argparse.Namespace) -> int:
    """Convert and say what it came to."""
    shard = convert.size(options.shards) if options.shards else None
    with Steps(f"converting {options.model}") as steps:
        done = convert.convert(
            options.model, options.out, options.recipe,
            dtype=options.dtype, shard=shard, expect=steps.expect, tick=steps.done,
        )  # fmt: skip
    console = Console()
    if options.json:
        console.print_json(json.dumps({**dataclasses.asdict(done), "out": str(done.out)}))
        return 0
    was, now = done.read / 1e6, done.written / 1e6
    again = f", {done.resumed} files from an earlier run" if done.resumed else ""
    console.print(
        f"{done.out}: {was:.1f} MB of weights became {now:.1f} MB, {done.rounded} layers "
        f"rounded{again}.",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    return 0
