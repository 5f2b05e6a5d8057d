"""``optimus plan``: what a recipe would do to a model, from its config alone.

No weight is read: the model is built with every tensor on meta.
"""

from __future__ import annotations

import argparse
from collections import Counter

from rich.console import Console
from rich.table import Table

import optimus
from optimus.core.backend import BACKENDS, Mode
from optimus.core.planner import Plan
from optimus.core.recipes import ATTENTIONS
from optimus.measure import load


def add_attention(parser: argparse.ArgumentParser) -> None:
    """The option that names a kernel."""
    text = "the kernel that computes attention, to compare kernels; default: auto"
    parser.add_argument("--attention", choices=ATTENTIONS, default="auto", help=text)


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("plan", help="what a recipe would do to a model")
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    parser.add_argument("--recipe", default="auto", help="default: auto")
    parser.add_argument("--backend", choices=("cpu", *BACKENDS, "tpu"), help="default: this one")
    modes = [mode.value for mode in Mode]
    parser.add_argument("--mode", choices=modes, default=Mode.INFERENCE.value)
    add_attention(parser)
    parser.add_argument("--json", action="store_true", help="the plan itself, for optimus.apply")
    parser.set_defaults(func=run)


def _table(*headings: str, title: str) -> Table:
    table = Table(*headings, title=title)
    for column in table.columns:
        column.overflow = "fold"  # a path that is cut short cannot be looked up
    return table


def _claims(plan: Plan) -> Table:
    kinds = {c.path: (c.replacement, f"{c.before} -> {c.after}", c.measured) for c in plan.claims}
    counts = Counter(kinds.values())
    first = {kind: path for path, kind in reversed(kinds.items())}
    fidelity = {c.replacement: c.fidelity for c in plan.claims}
    table = _table("replacement", "sites", "what", "fidelity", "first", title="claims")
    for kind, count in counts.items():
        name, change, why = kind
        what = "; ".join(filter(None, (change, why)))
        table.add_row(name, str(count), what, fidelity[name], first[kind] or "(model)")
    return table


def _refusals(plan: Plan) -> Table:
    counts = Counter((name, refusal.reason) for _, name, refusal in plan.refusals)
    first = {(name, refusal.reason): path for path, name, refusal in reversed(plan.refusals)}
    table = _table("replacement", "sites", "left alone because", "first", title="refusals")
    for (name, reason), count in counts.items():
        table.add_row(name, str(count), reason, first[name, reason] or "(model)")
    return table


def show(plan: Plan, console: Console) -> None:
    """The plan as tables, equal lines counted rather than repeated."""
    if plan.claims:
        console.print(_claims(plan))
    if plan.refusals:
        console.print(_refusals(plan))
    backend = plan.context.backend.name
    console.print(
        f"recipe {plan.recipe.label()}, backend {backend}, {plan.context.mode.value}: "
        f"{len(plan.claims)} claims, {len(plan.refusals)} refusals, "
        f"passes: {', '.join(plan.passes) or 'none'}.",
        highlight=False,
    )
    console.print(f"verification: {plan.verification}.", highlight=False)


def run(options: argparse.Namespace) -> int:
    """Plan on meta tensors and print."""
    console = Console()
    with Console(stderr=True).status(f"planning {options.recipe} for {options.model}"):
        model = load.skeleton(load.read_config(options.model))
        asked = {name: getattr(options, name) for name in ("backend", "mode", "attention")}
        plan = optimus.plan(model, options.recipe, **asked)
    if options.json:
        console.print_json(plan.to_json())
    else:
        show(plan, console)
    return 0
