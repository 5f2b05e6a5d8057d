"""What was measured to pay, where, and at which length: the tables that plans decide by.

One table ships as data. Its keys are a backend and a dtype, and for bf16 whether the processor
computes in it; its values are, for each replacement, how many times faster than stock the site was
at each number of keys. Another is in the user's cache folder, where ``optimus tune`` writes it. It
has the same form for each processor, number of threads and version of torch, is read first, and
also knows replacements at a size, whose figures are by the number of rows.
"""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
import warnings
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from optimus.core.backend import Context, host, processor
from optimus.core.errors import Refusal

# What a claim has to bring at some length that is not extreme.
GAIN, USUAL = 1.3, 1000
# Slower than this by rows is a loss, and faster a gain: what is between is the machine's noise.
LOSS, WORTH = 0.97, 1.05
FORMAT = 1

# By kind of hardware and dtype, by name: times faster than stock at each number of keys or rows.
Ratios = dict[str, dict[str, dict[str, float]]]


@dataclass(frozen=True, slots=True)
class Measured:
    """Times faster than stock by number of keys, or of rows, in ascending order."""

    ratios: tuple[tuple[int, float], ...]
    where: str
    unit: str = "keys"

    @property
    def shortest(self) -> int | None:
        """The least number of keys from which on it never was slower.

        None where it nowhere brings what a claim has to, and for rows, where every call is served.
        Below the shortest measured length nothing is known, and nothing claimed.
        """
        if self.unit == "rows":
            return None
        first = 1
        for length, ratio in self.ratios:
            if ratio < 1:
                first = length + 1
        longer = [length for length, _ in self.ratios if length >= first]
        gains = [ratio for length, ratio in self.ratios if length <= USUAL]
        if not longer or max(gains, default=0.0) < GAIN:
            return None
        return longer[0]

    @property
    def loses_nowhere(self) -> bool:
        """Whether it gains at some number, and is slower than stock at none."""
        found = [ratio for _, ratio in self.ratios]
        return min(found) >= LOSS and max(found) >= WORTH

    def __str__(self) -> str:
        found = ", ".join(f"{ratio:.2f}x at {length}" for length, ratio in self.ratios)
        return f"measured {found} {self.unit} ({self.where})"


@functools.cache
def _table() -> dict[str, Any]:
    text = files("optimus").joinpath("costs.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def key(context: Context) -> str:
    """Under which name the table holds this hardware and dtype."""
    backend = context.backend
    kind = str(context.dtype).removeprefix("torch.")
    native = context.dtype is torch.bfloat16 and "native-bf16" in backend.features
    return f"{backend.name}/{'native-' if native else ''}{kind}"


def backends(name: str) -> frozenset[str]:
    """Where the table says that a replacement pays, in some dtype."""
    return frozenset(
        kind.partition("/")[0]
        for kind in _table()
        if isinstance(found := _found(name, kind), Measured) and found.shortest
    )


def measured(name: str, context: Context) -> Measured | Refusal:
    """What the tables say of a replacement; a refusal where they say nothing, or no gain."""
    found = _tuned(name, context) or _found(name, key(context))
    if found is None:
        return Refusal(f"not measured on {key(context)}")
    return found if found.shortest else Refusal(f"does not pay: {found}")


def measured_rows(name: str, context: Context) -> Measured | Refusal | None:
    """What this machine's table says of a replacement at a size; None where it says too little.

    One row counts for models that decode alone, and there it has to be known.
    """
    found = _tuned(name, context, unit="rows")
    if found is None:
        return None
    pairs = tuple((rows, ratio) for rows, ratio in found.ratios if rows > 1 or context.decodes)
    if not pairs or (context.decodes and pairs[0][0] > 1):
        return None
    found = Measured(pairs, found.where, "rows")
    return found if found.loses_nowhere else Refusal(f"does not pay: {found}")


def table_path() -> Path:
    """Where this user's own table is, or would be."""
    # ``Path.home`` raises for a user without one, who then simply has no table.
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(cache) / "optimus" / "costs.json"


def machine() -> str:
    """Under which name this user's table holds this machine: figures of another say nothing."""
    return f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def record(found: Ratios, when: str) -> Path:
    """Merge figures of this machine into the user's table; where it is.

    Written beside and moved into place, so that nobody ever reads half of it. ``OSError`` where
    the folder cannot be written.
    """
    path = table_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    known = _read(path, _stamp(path))
    machines = {**known, machine(): _merged(known.get(machine(), {}), found, when)}
    text = json.dumps({"format": FORMAT, "machines": machines}, indent=1) + "\n"
    with tempfile.TemporaryDirectory(dir=path.parent) as beside:
        fresh = Path(beside) / path.name
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    return path


def _merged(known: dict[str, Any], found: Ratios, when: str) -> dict[str, Any]:
    parts = dict(known)
    for kind, names in found.items():
        part = parts.get(kind, {"where": {}, "ratios": {}})
        ratios = {name: {**part["ratios"].get(name, {}), **new} for name, new in names.items()}
        parts[kind] = {
            "where": part["where"] | dict.fromkeys(names, f"this machine, {when}"),
            "ratios": part["ratios"] | ratios,
        }
    return parts


def _stamp(path: Path) -> tuple[int, int]:
    """Changes when the file does; zeros where there is none."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino


@functools.lru_cache(maxsize=1)
def _read(path: Path, stamp: tuple[int, int]) -> dict[str, Any]:
    """The machines of a user's table; none where it is absent, or damaged, which is said."""
    if stamp == (0, 0):
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["format"] != FORMAT:
            raise ValueError(f"its format is {table['format']!r}, and {FORMAT} is read")
        machines: dict[str, Any] = table["machines"]
        for parts in machines.values():
            for part in parts.values():
                _check(part)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"the cost table {path} is damaged and was ignored ({what}). "
            "`optimus tune` writes a new one.",
            stacklevel=2,
        )
        return {}
    return machines


def _check(part: dict[str, Any]) -> None:
    for name, ratios in part["ratios"].items():
        if not isinstance(part["where"][name], str):
            raise TypeError(f"{name} does not say where it was measured")
        for number, ratio in ratios.items():
            if not (int(number) > 0 and 0 < float(ratio) < math.inf):
                raise ValueError(f"{name} at {number} is {ratio}")


def _tuned(name: str, context: Context, *, unit: str = "keys") -> Measured | None:
    """What this machine's own table says; nothing of another machine that is asked about."""
    if context.backend != host():
        return None
    path = table_path()
    part = _read(path, _stamp(path)).get(machine(), {}).get(key(context))
    if part is None or name not in part["ratios"]:
        return None
    return _sorted(part["ratios"][name], part["where"][name], unit)


def _found(name: str, kind: str) -> Measured | None:
    part = _table().get(kind, {})
    ratios = part.get("ratios", {})
    found = ratios.get(name) or ratios.get("*." + name.partition(".")[2])
    return _sorted(found, part["where"], "keys") if found else None


def _sorted(ratios: dict[str, float], where: str, unit: str) -> Measured:
    return Measured(tuple(sorted((int(number), r) for number, r in ratios.items())), where, unit)
