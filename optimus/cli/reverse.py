"""``optimus reverse``: the original of a converted folder, held to the digests of its tensors."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from rich.console import Console

from optimus.cli.progress import Steps
from optimus.export import restore

EXAMPLE = """example:
  optimus reverse OUT BACK
"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "reverse",
        help="write the original of a converted folder, bit for bit",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="a folder that convert wrote")
    parser.add_argument(
        "back", metavar="BACK", type=Path, nargs="?", help="a new folder; default: OUT-original"
    )
    parser.add_argument("--json", action="store_true", help="what was done, for programs")
    parser.set_defaults(func=run)


def run(options: argparse.Namespace) -> int:
    """Restore and say from where."""
    with Steps(f"reversing {options.out}") as steps:
        done = restore.restore(options.out, options.back, expect=steps.expect, tick=steps.done)
    console = Console()
    if options.json:
        facts = {name: str(one) for name, one in dataclasses.asdict(done).items()}
        console.print_json(json.dumps({**facts, "tensors": done.tensors}))
        return 0
    console.print(
        f"{done.back}: {done.tensors} tensors of {done.source}, each with its digest.",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    return 0
