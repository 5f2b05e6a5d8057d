"""Runs the notebooks and writes them back with their outputs, without a path of this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
SECONDS = 600  # for one cell, on a slow machine


def tidied(notebook: Any) -> Any:
    """What differs from run to run, and is of no use to a reader, goes."""
    for cell in notebook.cells:
        cell.metadata = {}
    name = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = {"kernelspec": name, "language_info": {"name": "python"}}
    return notebook


def run(path: Path) -> None:
    """Execute in a fresh kernel of this very Python; raises where a cell does."""
    notebook = nbformat.read(path, as_version=4)
    here = {"metadata": {"path": str(FOLDER)}}
    client = NotebookClient(notebook, timeout=SECONDS, resources=here)
    # tqdm asks for widgets on stderr, by the path of its file; no notebook here shows a bar.
    client.execute(env={**os.environ, "PYTHONWARNINGS": "ignore:IProgress not found"})
    nbformat.write(tidied(notebook), path)


if __name__ == "__main__":
    chosen = [FOLDER / name for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb"))
    for one in chosen:
        run(one)
        print(f"{one.name}: done")
