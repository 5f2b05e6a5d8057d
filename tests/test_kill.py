"""Killed at any moment, a conversion leaves the old or the new folder, and goes on later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from optimus.export.convert import convert
from optimus.export.place import making

HERE = Path(__file__).parent


def files(folder: Path) -> dict[str, bytes]:
    """All of a folder."""
    found = (p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in found}


def small(folder: Path) -> Path:
    """A decoder of half a million weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 64}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, **layers)).save_pretrained(folder)
    return folder


def test_killed_and_resumed(tmp_path):
    """Ten kills at random moments, and what came of it is bitwise what came undisturbed."""
    model = small(tmp_path / "model")
    (tmp_path / "work").mkdir()
    command = [sys.executable, str(HERE / "killed.py"), str(model), str(tmp_path / "work")]
    # A child of a fork hangs in an OpenMP that had threads.
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    run = subprocess.run(
        [*command, "7", "10"], capture_output=True, text=True, env=alone, check=False
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["killed"] > 0
    assert files(tmp_path / "work" / "out") == files(tmp_path / "work" / "whole")
    assert ".out.optimus" not in found["left"]


def test_killed_before_the_last_rename(tmp_path, monkeypatch):
    """Everything is written, and only the name is missing: the next run writes nothing twice."""
    model, out = small(tmp_path / "model"), tmp_path / "out"
    convert(str(model), tmp_path / "whole", "int8")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("optimus.export.place._settle", killed)
        with pytest.raises(KeyboardInterrupt):
            convert(str(model), out, "int8")
    assert not out.exists()
    convert(str(model), out, "int8")
    assert files(out) == files(tmp_path / "whole")


def test_a_journal_that_was_cut(tmp_path):
    """A line of which the end is missing counts for nothing, and spoils no other."""
    beside = tmp_path / ".out.optimus"
    beside.mkdir()
    head = json.dumps({"fingerprint": "f"})
    done = json.dumps({"file": "a", "facts": 1})
    (beside / "journal").write_text(f"{head}\n{done}\n" + done[:9])
    with making(tmp_path / "out", "f") as place:
        assert place.done == {"a": 1}
        place.note("b", 2)
        lines = (beside / "journal").read_text().splitlines()
        assert [json.loads(line).get("file") for line in lines] == [None, "a", "b"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_another_conversion_begins_anew(tmp_path):
    """What an earlier run left for other options is not mixed in."""
    beside = tmp_path / ".out.optimus"
    (beside / "tree").mkdir(parents=True)
    (beside / "tree" / "old").write_text("")
    (beside / "journal").write_text(json.dumps({"fingerprint": "other"}) + "\n")
    with making(tmp_path / "out", "f") as place:
        assert place.done == {}
    assert list((tmp_path / "out").iterdir()) == []
