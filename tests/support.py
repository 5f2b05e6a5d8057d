"""The support table: which model types have their attention on a fused kernel, by running them.

``python tests/support.py --markdown`` prints it for the README; ``make test-all`` compares.
"""

from __future__ import annotations

import functools
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import sweep
import torch
import zoo
from sweep import NOT_SCORES
from torch import nn

import optimus
from optimus.core.planner import JOURNAL

FEATURES = frozenset({"packed-linear", "packed-linear-bf16", "native-bf16"})
CAPABLE = optimus.Backend("x86", "cpu", "AuthenticAMD", FEATURES)
START, END = "<!-- attention table -->\n", "\n<!-- /attention table -->"
HOST, NONE, ABSENT = "host", "none", "absent"
GROUPS = {
    "A": "asks the host, which has no SDPA for it",
    "B": "written out by hand",
    "C": "by hand, with positions or tables added",
    "D": "sinks",
    "E": "soft caps, windows and blocks",
    "F": "not softmax(QKᵀ)V",
    "MLA": "values narrower than keys",
    "islands": "by hand inside a model on SDPA",
    "on request": "eager unless asked otherwise, and asked by optimus",
    HOST: "on SDPA without optimus",
    "?": "left, and not explained",
}

# Refusals of rows that are for another way of loading the model.
ELSEWHERE = "attention is "


@dataclass(frozen=True)
class Finding:
    """What became of one model type."""

    model_type: str
    group: str
    fused: bool = False
    reasons: tuple[str, ...] = ()
    unexplained: frozenset[str] = frozenset()
    far: float = 0.0


@functools.cache
def classify(model_type: str) -> Finding:
    """Build it, transform a copy, run both on a padded and a full batch, and see what ran."""
    absent = (zoo.NEEDS | zoo.CANNOT).get(model_type)
    if absent is not None:
        needs = f"needs {absent}" if model_type in zoo.NEEDS else absent
        return Finding(model_type, ABSENT, reasons=(needs,))
    stock = zoo.build(model_type)
    mine = sweep.transformed(stock, "auto", CAPABLE)
    before, after, far = sweep.Seen(), sweep.Seen(), 0.0
    for padding in ("right", "none"):
        given = zoo.inputs(stock, padding=padding)
        expected, seen = sweep.watched(stock, given)
        before.add(seen)
        found, seen = sweep.watched(mine, given)
        after.add(seen)
        far = max(far, sweep.error(found, expected, stock, given))
    plan = vars(mine)[JOURNAL].plan
    claims = {c.replacement for c in plan.claims if ".attention." in c.replacement}
    return judged(model_type, claims, _refusals(stock, plan), before, after, far)


def _refusals(stock: nn.Module, plan: optimus.Plan) -> dict[str, tuple[str, str]]:
    """Which class is refused: the group of the row that does, and why."""
    return {
        type(stock.get_submodule(path)).__qualname__: (sweep.group_of(name), why.reason)
        for path, name, why in plan.refusals
        if ".attention." in name and not why.reason.startswith(ELSEWHERE)
    }


def judged(
    model_type: str,
    claims: set[str],
    refused: dict[str, tuple[str, str]],
    before: sweep.Seen,
    after: sweep.Seen,
    far: float,
) -> Finding:
    """The group and the verdict from what ran before and after."""
    left = [path for path in after.written if not NOT_SCORES.keys() & set(path)]
    moved = before.owners(frozenset(NOT_SCORES)) - {path[0] for path in left}
    why = {path[0]: next((refused[c] for c in path if c in refused), None) for path in left}
    if not left and not after.fused:
        # Attention that takes no softmax at all.
        why = {name: reason for name, reason in refused.items() if reason[0] == "F"}
    groups = {group for group, _ in filter(None, why.values())}
    groups = groups or ({"?"} if left else {sweep.group_of(c) for c in claims} if moved else set())
    group = next((g for g in [*GROUPS, "?"] if g in groups), HOST if after.fused else NONE)
    return Finding(
        model_type,
        group,
        fused=bool(after.fused),
        reasons=tuple(dict.fromkeys(reason for _, reason in filter(None, why.values()))),
        unexplained=frozenset(name for name, reason in why.items() if reason is None),
        far=far,
    )


def findings() -> list[Finding]:
    """Of every model type of transformers, and of rows whose type no auto class builds."""
    named = [sweep.WITHIN.get(row.model_type, row.model_type) for row in sweep.rows()]
    others = sorted(set(named) - set(zoo.model_types()))
    why = ("no auto class has it under its own name; its rows are tested on their parts",)
    return [classify(model_type) for model_type in zoo.model_types()] + [
        Finding(model_type, ABSENT, reasons=why) for model_type in others
    ]


def markdown(found: list[Finding]) -> str:
    """A summary by group, and what is in each."""
    lines = ["| group | attention | types | on a fused kernel | in part | refused | share |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    attending = [f for f in found if f.group not in (NONE, ABSENT)]
    present = {group: what for group, what in GROUPS.items() if _of(found, group)}
    lines += [_row(group, what, _of(found, group)) for group, what in present.items()]
    lines.append(_row("all", "attention", attending))
    lines += [_details(f"{group}: {what}", _of(found, group)) for group, what in present.items()]
    lines.append(_details("No softmax attention", _of(found, NONE)))
    lines.append(_details("Not built here", _of(found, ABSENT)))
    return "\n".join(lines)


def _row(group: str, what: str, found: list[Finding]) -> str:
    whole = [f for f in found if f.fused and not f.reasons and not f.unexplained]
    part = [f for f in found if f.fused and f not in whole]
    counts = (len(found), len(whole), len(part), len(found) - len(whole) - len(part))
    share = f"{len(whole) / max(1, len(found)):.0%}"
    return f"| {group} | {what} | {' | '.join(map(str, counts))} | {share} |"


def _of(found: list[Finding], group: str) -> list[Finding]:
    return [f for f in found if f.group == group]


def _details(title: str, found: list[Finding]) -> str:
    """The types without a remark in one line, then those with a reason, one reason a line."""
    plain = [f.model_type for f in found if not f.reasons]
    reasons: dict[str, list[str]] = {}
    for one in found:
        if one.reasons:
            part = "in part: " if one.fused else ""
            reasons.setdefault(part + "; ".join(one.reasons), []).append(one.model_type)
    lines = [", ".join(plain)] if plain else []
    lines += [f"- {', '.join(types)}: {reason}" for reason, types in reasons.items()]
    body = "\n".join(lines)
    return f"\n<details><summary>{title} ({len(found)})</summary>\n\n{body}\n\n</details>"


def readme() -> str:
    """The table as the README has it."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    return text.split(START)[1].split(END)[0]


def main(arguments: list[str]) -> int:
    """Print the table, or a line for each of the types that are named."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with sweep.measured_everywhere():
        if arguments == ["--markdown"]:
            sys.stdout.write(markdown(findings()) + "\n")
        else:
            for name in arguments or zoo.model_types():
                sys.stdout.write(f"{classify(name)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
