"""The command: what it prints, what it exits with, and one clear line for each bad input."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import optimus
from optimus.cli import list as listing
from optimus.cli import main
from optimus.core.backend import BACKENDS
from optimus.core.recipes import RECIPES
from optimus.core.registry import Registry

ROOT = Path(__file__).parents[1]
START, END = "<!-- support table -->\n", "\n<!-- /support table -->"


@pytest.fixture
def copy(tiny_bert, tmp_path):
    """A copy of the tiny model's folder, to be damaged."""
    return Path(shutil.copytree(tiny_bert, tmp_path / "copy"))


@pytest.fixture
def data(tmp_path):
    """Four ragged texts."""
    file = tmp_path / "texts"
    file.write_text("the value\nto be is to be\nif a list is the value of a list\nreturn\n")
    return file


def refused(capsys, *arguments) -> str:
    """Run a command that must fail as bad input; its one line, without the prefix."""
    assert main([str(a) for a in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = [line for line in printed.err.splitlines() if line.startswith("optimus: error: ")]
    assert len(lines) == 1
    assert "Traceback" not in printed.err
    return lines[0].removeprefix("optimus: error: ")


def test_list_shows_every_architecture_on_every_backend(capsys):
    """JSON holds the whole registry, and so does the table."""
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    registry = Registry.installed()
    names = [a["architecture"] for a in listed["architectures"]]
    assert names == [a.model_type for a in registry.architectures]
    replacements = [r["name"] for a in listed["architectures"] for r in a["replacements"]]
    assert replacements == [r.name for r in registry.replacements]
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)


def test_the_readme_shows_what_list_prints(capsys):
    """The support table is generated, so it cannot lag behind."""
    assert main(["list", "--markdown"]) == 0
    printed = capsys.readouterr().out
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = readme.split(START)[1].split(END)[0]
    assert block == printed.rstrip("\n") == listing.markdown(Registry.installed())


def test_plan_reads_the_config_alone(copy, capsys):
    """No weights in the folder, and a plan all the same; its JSON is a plan again."""
    (copy / "model.safetensors").unlink()
    assert main(["plan", str(copy), "--json"]) == 0
    plan = optimus.Plan.from_json(capsys.readouterr().out)
    assert plan.claims
    assert main(["plan", str(copy)]) == 0
    shown = capsys.readouterr().out
    assert f"{len(plan.claims)} claims" in shown
    assert "first" in shown


def test_plan_in_training_mode_says_why_sites_are_left(tiny_bert, capsys):
    """Refusals are shown once for each reason, with a count."""
    assert main(["plan", str(tiny_bert), "--mode", "training"]) == 0
    assert "left alone because" in capsys.readouterr().out


def test_env_says_what_each_recipe_can_do_here(capsys):
    """Every backend and recipe has a line, and auto is available everywhere."""
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["backends"]) == set(BACKENDS)
    assert set(found["recipes"]) == set(RECIPES)
    assert found["recipes"]["auto"] == "available"
    assert found["machine"]["cores"] >= 1
    assert main(["env"]) == 0
    assert "allocator" in capsys.readouterr().out


def test_bench_shows_a_table_and_a_verdict(tiny_bert, data, capsys):
    """For a reader: one table, the conditions, one sentence."""
    assert main(["bench", str(tiny_bert), "--data", str(data), "--runs", "1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "x stock" in shown
    assert "threads, " in shown
    assert re.search(r"(keep stock|relative error of [\d.e+-]+)\.$", shown)


def test_an_unverified_side_exits_with_1(tiny_bert, data, capsys, monkeypatch, tmp_path):
    """A tolerance that nothing meets: the side is named, and a script can see it."""
    (tmp_path / "sitecustomize.py").write_text(
        "from optimus.core import verify\nverify.CLOSE = dict.fromkeys(verify.CLOSE, -1.0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    assert main(["bench", str(tiny_bert), "--data", str(data), "--runs", "1"]) == 1
    assert "auto not verified" in " ".join(capsys.readouterr().out.split())


def test_a_model_that_is_not_there(tmp_path, capsys):
    """An absent folder, a folder without a config and a file each get their own words."""
    assert "no such folder" in refused(capsys, "plan", tmp_path / "absent")
    assert "no config.json" in refused(capsys, "plan", tmp_path)
    (tmp_path / "file").touch()
    assert "is a file" in refused(capsys, "bench", tmp_path / "file")


def test_a_config_that_cannot_be_used(copy, capsys):
    """Broken JSON, an unknown model type and sizes that do not divide."""
    file = copy / "config.json"
    config = json.loads(file.read_text())
    file.write_text("{")
    assert "cannot read its config" in refused(capsys, "plan", copy)
    file.write_text(json.dumps({"model_type": "nonesuch"}))
    assert "cannot read its config" in refused(capsys, "plan", copy)
    file.write_text(json.dumps(config | {"num_attention_heads": 3}))
    assert "cannot build" in refused(capsys, "plan", copy)


@pytest.mark.parametrize("command", ["plan", "bench"])
def test_names_that_do_not_exist(tiny_bert, capsys, command):
    """An unknown recipe lists those that there are."""
    assert "known are auto" in refused(capsys, command, tiny_bert, "--recipe", "fast")


def test_a_recipe_that_is_not_built(tiny_bert, capsys):
    """Known and not built for this hardware is not the same as unknown."""
    assert "not built for" in refused(capsys, "plan", tiny_bert, "--recipe", "fp8")


@pytest.mark.parametrize("option", ["--backend", "--mode"])
def test_options_with_choices(tiny_bert, capsys, option):
    """argparse lists the choices and exits with 2."""
    with pytest.raises(SystemExit) as stopped:
        main(["plan", str(tiny_bert), option, "nonesuch"])
    assert stopped.value.code == 2
    assert "choose from" in capsys.readouterr().err


def test_bench_refuses_weights_that_it_cannot_trust(copy, capsys):
    """The side's process finds the damage; the command says it in one line."""
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "damaged or cut short" in refused(capsys, "bench", copy, "--runs", "1")


def test_bench_refuses_a_tokenizer_that_does_not_fit(copy, capsys):
    """None at all, which transformers would make up, and one with more tokens than the model."""
    kept = (copy / "tokenizer.json").read_text()
    for name in ("tokenizer.json", "vocab.txt"):
        (copy / name).unlink()
    assert "has no tokenizer" in refused(capsys, "bench", copy)
    (copy / "tokenizer.json").write_text(kept)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": 8}))
    assert "not a pair" in refused(capsys, "bench", copy)


def test_bench_refuses_text_that_is_not_there(tiny_bert, tmp_path, capsys):
    """Found before any process starts."""
    assert "cannot read" in refused(capsys, "bench", tiny_bert, "--data", tmp_path / "absent")


def alive(process: str) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# A shell that puts the suite in the background has it ignore the signal; a user's does not.
INTERRUPTIBLE = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from optimus.cli import main; sys.exit(main())"
)


def test_ctrl_c_exits_with_130_and_leaves_no_process(tiny_bert):
    """Interrupted while its sides work."""
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "bench", str(tiny_bert), "--runs", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        while len(sides := children.read_text().split()) < 2:
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.endswith("optimus: error: interrupted.\n")
    assert "Traceback" not in errors
    deadline = time.monotonic() + 60
    while any(alive(side) for side in sides):
        assert time.monotonic() < deadline
        time.sleep(0.1)
