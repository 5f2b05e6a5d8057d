"""``optimus list``: what optimus knows how to do, for which architecture and on which backend."""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.table import Table

from optimus.core import costs
from optimus.core.backend import BACKENDS, Mode
from optimus.core.registry import Registry
from optimus.core.replacement import ANY_MODE, EVERYWHERE, Architecture, Pass, Replacement

HEADINGS = ("what is swapped", "fidelity", "mode", "backends", "architectures")
# What 80 columns leave for what is swapped beside the longest name of an architecture, and where.
NARROW = 15


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("list", help="what is swapped, for which architecture")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--markdown", action="store_true", help="the README's support table")
    shape.add_argument("--json", action="store_true", help="everything, for programs")
    parser.set_defaults(func=run)


def _backends(names: frozenset[str]) -> str:
    return "all" if names >= EVERYWHERE else ", ".join(b for b in BACKENDS if b in names)


def _modes(modes: frozenset[Mode]) -> str:
    return "any" if modes >= ANY_MODE else ", ".join(sorted(mode.value for mode in modes))


def _kind(one: Replacement) -> tuple[str, ...]:
    """What a replacement does, without the architecture that its name begins with."""
    part = one.name.partition(".")[2]
    if one.because:
        return part, "refused", "", ""
    where = costs.backends(one.name) if one.gated else one.backends
    return part, one.fidelity.value, _modes(one.modes), _backends(where) or "none yet"


def rows(registry: Registry) -> list[tuple[str, ...]]:
    """One row a kind of swap with the architectures that have it, then one a pass."""
    kinds: dict[tuple[str, ...], dict[str, None]] = {}
    for architecture in registry.architectures:
        for one in architecture.replacements:
            kinds.setdefault(_kind(one), {})[architecture.model_type] = None
    swaps = [(*kind, ", ".join(names)) for kind, names in sorted(kinds.items())]
    own = {a.model_type for a in registry.architectures if a.replacements}
    if plain := [a.model_type for a in registry.architectures if a.model_type not in own]:
        swaps.append(("what `any` has", "", "", "", ", ".join(plain)))
    return swaps + [
        (one.name, one.fidelity.value, "", _backends(one.backends), "the whole model")
        for one in registry.passes
    ]


def markdown(registry: Registry) -> str:
    """The rows as a Markdown table."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *rows(registry)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _replacement_data(replacement: Replacement) -> dict[str, object]:
    return {
        "name": replacement.name,
        "fidelity": replacement.fidelity.value,
        "modes": sorted(mode.value for mode in replacement.modes),
        "backends": sorted(replacement.backends),
        "gated": replacement.gated,
        "because": replacement.because,
    }


def _architecture_data(architecture: Architecture) -> dict[str, object]:
    return {
        "architecture": architecture.model_type,
        "replacements": [_replacement_data(r) for r in architecture.replacements],
    }


def _pass_data(one: Pass) -> dict[str, object]:
    return {"name": one.name, "fidelity": one.fidelity.value, "backends": sorted(one.backends)}


def data(registry: Registry) -> dict[str, object]:
    """Everything registered, as JSON-able data."""
    return {
        "architectures": [_architecture_data(a) for a in registry.architectures],
        "passes": [_pass_data(p) for p in registry.passes],
    }


def _table(registry: Registry) -> Table:
    table = Table(*HEADINGS)
    # No name in two pieces, however narrow the screen.
    table.columns[-1].min_width = max(len(f"{a.model_type},") for a in registry.architectures)
    table.columns[0].max_width, table.columns[0].overflow = NARROW, "fold"
    table.columns[3].max_width = len("x86, arm,")
    table.columns[2].max_width = max(len(mode.value) for mode in Mode)
    for row in rows(registry):
        table.add_row(*row)
    return table


def run(options: argparse.Namespace) -> int:
    """Print the registry in the shape asked for."""
    registry = Registry.installed()
    console = Console()
    if options.json:
        console.print_json(json.dumps(data(registry)))
    elif options.markdown:
        console.print(markdown(registry), soft_wrap=True, markup=False, highlight=False)
    else:
        console.print(_table(registry))
    return 0
