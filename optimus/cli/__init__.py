"""The ``optimus`` command: one file a subcommand, one line on stderr for what a user can mend.

Exit codes: 0 done, 1 a model was not verified, 2 input that cannot be used, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from optimus.cli import bench, convert, env, export, plan, reverse, tune, verify
from optimus.cli import list as listing
from optimus.core.errors import OptimusError, VerificationError
from optimus.measure import machine

UNVERIFIED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def parser() -> argparse.ArgumentParser:
    """All subcommands, each of which sets ``func``."""
    top = argparse.ArgumentParser(
        prog="optimus", description="Faster transformers models in place, verified and reversible."
    )
    top.add_argument("--version", action="version", version=f"optimus {machine.version('optimus')}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (listing, plan, bench, tune, convert, export, verify, reverse, env):
        command.register(commands)
    return top


def _complain(message: str) -> None:
    print(f"optimus: error: {message}", file=sys.stderr)  # noqa: T201 - plain, for scripts and logs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    options = parser().parse_args(arguments)
    try:
        code: int = options.func(options)
    except VerificationError as error:
        _complain(str(error))
        return UNVERIFIED
    except OptimusError as error:
        _complain(str(error))
        return BAD_INPUT
    except KeyboardInterrupt:
        _complain("interrupted.")
        return INTERRUPTED
    return code
