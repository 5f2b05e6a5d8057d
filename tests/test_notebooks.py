"""The notebooks as committed: whole, run in order, without errors or paths of a machine."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = ("01_quickstart", "02_quantize", "03_your_own_architecture")
# A path below a root that machines have; "/" alone is a fraction.
ABSOLUTE = re.compile(r"(?<![\w./:])(?:/(?:tmp|work|home|root|usr|opt|var|Users)/|[A-Z]:\\\\)")


def cells(name: str) -> list[dict]:
    """The cells that hold code."""
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_every_notebook_is_known():
    """A new one is held to the same."""
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_cells_parse_and_ran_in_order(name):
    """From a fresh kernel, from the first to the last."""
    found = cells(name)
    for cell in found:
        ast.parse("".join(cell["source"]))
    assert [cell["execution_count"] for cell in found] == list(range(1, len(found) + 1))


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_clean(name):
    """No error, no word on stderr, a plot, and no path of the machine that ran it."""
    outputs = [output for cell in cells(name) for output in cell["outputs"]]
    assert [one for one in outputs if one["output_type"] == "error"] == []
    assert [one["text"] for one in outputs if one.get("name") == "stderr"] == []
    assert any("image/png" in one.get("data", {}) for one in outputs)
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert ABSOLUTE.search(text) is None


@pytest.mark.parametrize("name", NAMES)
def test_what_they_claim_came_out(name):
    """Every comparison that a notebook prints held when it was run."""
    printed = "".join(
        "".join(output.get("text", ""))
        for cell in cells(name)
        for output in cell["outputs"]
        if output["output_type"] == "stream"
    )
    assert "True" in printed
    assert not re.search(r"\w: False", printed)
