"""``optimus env``: what this machine is, and what optimus can do on it."""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.table import Table
from torch import nn

import optimus
from optimus.core import backend
from optimus.core.errors import OptimusError
from optimus.core.recipes import RECIPES
from optimus.measure import machine

# Wide enough for every kernel's shape rules.
WIDTH = 64


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("env", help="this machine, and what optimus can do on it")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(func=run)


def _recipe(name: str) -> str:
    """``"available"`` and what it costs, or why not: asked of the planner, on one linear layer."""
    try:
        plan = optimus.plan(nn.Sequential(nn.Linear(WIDTH, WIDTH)).eval(), name)
    except OptimusError as error:
        return str(error)
    return "; ".join(filter(None, ("available", *(claim.measured for claim in plan.claims))))


def _backend(name: str) -> str:
    if not backend.is_available(name):
        return "not on this machine"
    host = backend.host()
    return ", ".join(sorted(host.features)) or "present" if name == host.name else "present"


def data() -> dict[str, object]:
    """Machine, backends and recipes, as JSON-able data."""
    return {
        "machine": machine.describe(),
        "backends": {name: _backend(name) for name in backend.BACKENDS},
        "recipes": {name: _recipe(name) for name in RECIPES},
    }


def _shown(name: str, value: object) -> str:
    if isinstance(value, int) and name.endswith("_bytes"):
        return f"{value / 1e9:.1f} GB"
    if isinstance(value, dict):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(title: str, facts: dict[str, object]) -> Table:
    table = Table(title, "", show_header=True)
    for name, value in facts.items():
        table.add_row(name.removesuffix("_bytes").replace("_", " "), _shown(name, value))
    return table


def run(options: argparse.Namespace) -> int:
    """Print the three tables."""
    found = data()
    console = Console()
    if options.json:
        console.print_json(json.dumps(found))
        return 0
    for title, facts in found.items():
        assert isinstance(facts, dict)
        console.print(_table(title, facts))
    return 0
