"""Measurement: the text, the loading, the sides and what is made of their figures."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimus.measure import alternate, load, machine, report, text
from optimus.measure.figures import Comparison, Row, Work
from optimus.measure.side import STOCK, Runner, Task

TEXTS = ["the value of a list", "to be", "if the value is a return value then return it"]


@pytest.fixture
def task(tiny_bert):
    """Three ragged texts for the tiny model, two a batch."""
    return Task(model=str(tiny_bert), texts=TEXTS, batch=2, length=16)


@pytest.fixture
def copy(tiny_bert, tmp_path):
    """A copy of the tiny model's folder, to be damaged."""
    return Path(shutil.copytree(tiny_bert, tmp_path / "copy"))


def damage_weights(folder: Path, change) -> None:
    """Rewrite the weight file through ``change(state)``."""
    file = folder / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file, metadata={"format": "pt"})


def test_docstrings_are_ragged_and_in_a_fixed_order():
    """Two calls agree, a shorter one is the start of a longer one, and lengths differ."""
    texts = text.docstrings(32)
    assert texts[:8] == text.docstrings(8)
    assert len(set(texts)) == 32
    assert len({len(one.split()) for one in texts}) > 8
    assert all(len(one.split()) >= text.LEAST_WORDS and "\n" not in one for one in texts)


def test_a_file_is_split_at_blank_lines_or_else_by_line(tmp_path):
    """One text a line; where there are blank lines, one text a block."""
    file = tmp_path / "texts"
    file.write_text("one\ntwo\n")
    assert text.read_texts(file) == ["one", "two"]
    file.write_text("one\nmore\n\n\ntwo\n")
    assert text.read_texts(file) == ["one more", "two"]


@pytest.mark.parametrize(
    ("content", "says"), [(b"\n \n", "no text"), (b"\xff\xfe\x00", "not UTF-8"), (None, "No such")]
)
def test_a_file_without_text_is_an_error(tmp_path, content, says):
    """An empty, a binary and an absent file each say what is wrong."""
    file = tmp_path / "texts"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(load.LoadError, match=says):
        text.read_texts(file)


def test_batches_keep_order_and_pad_to_their_longest(tiny_bert):
    """Batches are cut at the length asked for, and tokens are counted without padding."""
    batches = text.batches(load.load_tokenizer(str(tiny_bert)), TEXTS, size=2, length=6)
    assert [tuple(b["input_ids"].shape) for b in batches] == [(2, 6), (1, 6)]
    assert batches[0]["attention_mask"].sum(dim=1).tolist() == [6, 4]
    assert text.count_tokens(batches) == (16, 18)


def test_a_model_loads_whole_and_in_evaluation_mode(tiny_bert):
    """The stock class in float32, on the CPU, with dropout off."""
    model = load.load_model(str(tiny_bert))
    assert type(model).__name__ == "BertModel"
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_skeleton_has_no_weights(tiny_bert):
    """From the config alone: the same parameter shapes, all on meta."""
    config = load.read_config(str(tiny_bert))
    shapes = {n: p.shape for n, p in load.load_model(str(tiny_bert)).named_parameters()}
    bare = load.skeleton(config)
    assert shapes == {n: p.shape for n, p in bare.named_parameters()}
    assert all(p.is_meta for p in bare.parameters())


def test_missing_weights_are_an_error(copy):
    """transformers would fill them with random numbers."""
    damage_weights(copy, lambda state: state.pop("encoder.layer.0.output.dense.weight"))
    with pytest.raises(load.LoadError, match=r"lack encoder\.layer\.0\.output\.dense\.weight"):
        load.load_model(str(copy))


def test_wrong_shapes_are_an_error(copy):
    """A config that does not fit the weights names the tensor and both shapes."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(load.LoadError, match=r"\(64,\) in the weights and \(48,\) by the config"):
        load.load_model(str(copy))


def test_nan_weights_are_an_error(copy):
    """NaN against NaN would verify anything."""
    damage_weights(copy, lambda state: state["pooler.dense.bias"].fill_(float("nan")))
    with pytest.raises(load.LoadError, match=r"pooler\.dense\.bias holds NaN"):
        load.load_model(str(copy))


def test_pickles_are_never_opened(copy):
    """A folder with a .bin alone is refused before anything reads it."""
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(load.LoadError, match="opening a pickle can run code"):
        load.load_model(str(copy))


def test_a_truncated_file_is_an_error(copy):
    """A download cut short says so."""
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(load.LoadError, match="damaged or cut short"):
        load.load_model(str(copy))


def test_peak_memory_is_this_process_s_own():
    """Peak is at least what is resident, and a child does not inherit its parent's."""
    ballast = torch.ones(100_000_000, dtype=torch.uint8)
    assert machine.peak_bytes() >= machine.resident_bytes() > ballast.numel()
    code = "from optimus.measure import machine as m; print(m.peak_bytes() - m.resident_bytes())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < ballast.numel()


def constant_side(task, batches):
    """A peer for the tests: the reference plus one in every place."""
    model = load.load_model(task.model)
    return Runner(lambda batch: model(**batch).last_hidden_state + 1, {"peer": True})


def broken_side(task, batches):
    """A peer whose process dies."""
    raise MemoryError("no room")


def nan_side(task, batches):
    """A peer that answers NaN."""
    return Runner(lambda batch: torch.full((*batch["input_ids"].shape, 32), float("nan")))


def test_sides_alternate_and_are_compared(task, monkeypatch):
    """Stock against itself is exact, a peer is measured alike, NaN is not verified."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    tasks = {
        STOCK: task,
        "again": task,
        "peer": dataclasses.replace(task, side="test_measure:constant_side"),
        "nan": dataclasses.replace(task, side="test_measure:nan_side"),
    }
    done: list[str] = []
    comparison = alternate.compare(tasks, runs=2, tick=done.append)
    stock, again, peer, nan = comparison.rows
    timed = [f"{name}: timed" for name in (STOCK, "again", "peer", "nan")]
    assert done[4:12] == timed * 2
    assert (len(stock.seconds), again.error, peer.facts["peer"]) == (2, 0.0, True)
    assert 0.1 < peer.error < 10
    assert "NaN" in nan.unverified
    assert comparison.work.tokens == stock.facts["tokens"] < comparison.work.places
    assert 0 < stock.loaded_bytes <= stock.peak_bytes


def test_a_side_that_dies_is_named_with_its_last_words(task, monkeypatch):
    """No hang and no traceback of the parent's pipes."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    broken = dataclasses.replace(task, side="test_measure:broken_side")
    with pytest.raises(alternate.SideError, match="'stock' died: MemoryError: no room"):
        alternate.compare({STOCK: broken}, runs=1)


@pytest.fixture
def comparison():
    """Figures made up: auto is twice as fast, slow is not, bf16 is refused."""
    work = Work(model="m<1>", texts=8, batch=4, tokens=300, places=400, length=64)
    stock = Row(name=STOCK, seconds=(0.2, 0.3, 0.25), error=0.0, threads=2, allocator="glibc")
    rows = (
        stock,
        dataclasses.replace(stock, name="auto", seconds=(0.1, 0.11, 0.15), error=5e-7),
        dataclasses.replace(stock, name="slow", seconds=(0.2, 0.4, 0.3), error=1e-7),
        Row(name="bf16", refused="no native bf16"),
    )
    return Comparison(work, rows, machine.describe())


def test_figures_are_of_the_fastest_run(comparison):
    """Ratio, throughput and spread, by hand."""
    auto = comparison.rows[1]
    assert comparison.ratio(auto) == pytest.approx(2.0)
    assert comparison.tokens_per_second(auto) == pytest.approx(3000)
    assert comparison.sequences_per_second(auto) == pytest.approx(80)
    assert auto.spread == pytest.approx(0.5)
    assert auto.median == pytest.approx(0.11)


def test_the_verdict_names_the_best_or_keeps_stock(comparison):
    """Faster in the fastest and in the median run, or it is no reason to change."""
    assert report.verdict(comparison).startswith("auto is 2.00x as fast as stock")
    slow = dataclasses.replace(comparison, rows=(comparison.rows[0], comparison.rows[2]))
    assert report.verdict(slow).endswith("keep stock.")


def test_the_report_has_every_side(comparison):
    """The JSON survives a round trip and the refused side keeps its reason."""
    data = json.loads(json.dumps(report.data(comparison)))
    assert [side["side"] for side in data["sides"]] == [STOCK, "auto", "slow", "bf16"]
    assert data["sides"][3]["refused"] == "no native bf16"
    assert data["sides"][1]["seconds"] == [0.1, 0.11, 0.15]
    assert report.cells(comparison, comparison.rows[3]) == ("bf16", "refused")
