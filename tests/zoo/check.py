"""Builds and runs every type, or the given ones: ``python tests/zoo/check.py [types...]``."""

from __future__ import annotations

import collections
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor of floats in an output."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors(inner)


def verdict(zoo: Any, model_type: str) -> tuple[str, str]:
    """One word, and what there is to say."""
    known = {"needs": zoo.NEEDS, "cannot": zoo.CANNOT}
    listed = next((word for word, table in known.items() if model_type in table), None)
    try:
        model = zoo.build(model_type)
        given = zoo.inputs(model)
        with torch.no_grad():
            found, again = (list(tensors(model(**given))) for _ in range(2))
    except Exception as error:  # noqa: BLE001 - whatever a model says against it is the finding
        reason = known[listed][model_type] if listed else _first_lines(error)
        return listed or "BAD", reason
    if not found or any(value.isnan().any() for value in found):
        return "BAD", "nothing, or not a number, comes out"
    notes = [type(model).__name__, "+".join(given)]
    notes += ["listed, and works"] * (listed is not None)
    notes += ["infinite"] * any(value.isinf().any() for value in found)
    notes += ["random"] * (not all(map(torch.equal, found, again)))
    return "ok", " ".join(notes)


def _first_lines(error: Exception) -> str:
    return f"{type(error).__name__}: " + " ".join(str(error).split())[:600]


def main(types: list[str]) -> int:
    """Print a line for each type and the counts; 1 if one neither works nor is listed."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import transformers

    import zoo

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    counts: collections.Counter[str] = collections.Counter()
    begin = time.perf_counter()
    for model_type in types or zoo.model_types():
        start = time.perf_counter()
        word, note = verdict(zoo, model_type)
        counts[word] += 1
        sys.stdout.write(f"{model_type:36} {word:6} {time.perf_counter() - start:5.2f} s  {note}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{dict(counts)} in {time.perf_counter() - begin:.0f} s\n")
    return int(counts["BAD"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
