"""``optimus tune``: bounded time, a table that plans read first and quote, and its bad luck."""

import dataclasses
import json
import time

import pytest
import torch
import zoo
from torch import nn

import optimus
from optimus.cli import main
from optimus.core import costs
from optimus.core.backend import Context, Mode, host
from optimus.core.errors import Refusal
from optimus.core.paths import Site
from optimus.core.registry import Registry
from optimus.measure import load, tune
from optimus.measure.tune import Job

HERE = Context(host(), Mode.INFERENCE, torch.float32)
KIND, PACKED = costs.key(HERE), "any.linear.packed"
WIDE, GPT = f"{PACKED} 512x256", "gpt2.conv1d.packed"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, one_thread):
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def encoder(tmp_path):
    """A folder with the config of a BERT that is wide enough to pack."""
    from transformers import BertConfig

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    config = BertConfig(**sizes, num_attention_heads=4, vocab_size=99)
    config.architectures = ["BertModel"]
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def linear() -> nn.Module:
    """Of the size that ``WIDE`` names."""
    return nn.Linear(256, 512).eval()


def remember(name, ratios):
    """Put made-up figures into the table."""
    costs.record({KIND: {name: {str(n): ratio for n, ratio in ratios.items()}}}, "2026-01-02")


def test_tune_ends_in_time_and_auto_goes_by_it(encoder, capsys):
    """Every size and number of rows that an encoder meets; claims and refusals quote them."""
    start = time.monotonic()
    assert main(["tune", str(encoder), "--seconds", "2", "--json"]) == 0
    assert time.monotonic() - start < 2 + 20
    said = json.loads(capsys.readouterr().out)
    assert said["table"] == str(costs.table_path())
    assert not said["left"]
    measured = said["ratios"][KIND]
    assert set(measured) == {f"{PACKED} {size}" for size in ("256x256", "512x256", "256x512")}
    assert all(set(ratios) == {"8", "64", "512"} for ratios in measured.values())
    plan = optimus.plan(load.skeleton(load.read_config(str(encoder))))
    claims = [c.measured for c in plan.claims if c.replacement == PACKED]
    refusals = [why.reason for _, name, why in plan.refusals if name == PACKED]
    assert len(claims + refusals) == 7
    assert all("measured " in why and "this machine, 20" in why for why in claims + refusals)
    for name, ratios in measured.items():
        slower = min(ratios.values()) < costs.LOSS
        found = costs.measured_rows(name, HERE)
        assert isinstance(found, Refusal) or not slower


def test_a_gain_is_claimed_and_quoted(capsys):
    """In the plan, through JSON and back, and in what it prints; without a shortest length."""
    remember(WIDE, {64: 2.1, 8: 0.99, 1: 0.5})
    plan = optimus.plan(linear())
    (claim,) = plan.claims
    assert claim.measured == "measured 0.99x at 8, 2.10x at 64 rows (this machine, 2026-01-02)"
    assert claim.shortest is None
    assert claim.measured in str(plan)
    assert optimus.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("ratios", [{8: 2.1, 512: 0.9}, {8: 1.01, 64: 0.99}])
def test_a_loss_is_refused(ratios):
    """Slower anywhere, or faster nowhere: the site stays stock, and the plan says by what."""
    remember(WIDE, ratios)
    plan = optimus.plan(linear())
    assert not plan.claims
    (refusal,) = (why for _, name, why in plan.refusals if name == PACKED)
    assert refusal.reason.startswith(f"does not pay: measured {ratios[8]:.2f}x at 8")


def test_decoding_is_decided_by_one_row_too():
    """Where it was not measured, nothing is known; where it loses, the others do not help."""
    decoding = dataclasses.replace(HERE, decodes=True)
    remember(WIDE, {8: 2.0, 64: 2.0})
    assert costs.measured_rows(WIDE, decoding) is None
    remember(WIDE, {1: 0.88})
    assert "0.88x at 1, 2.00x at 8" in costs.measured_rows(WIDE, decoding).reason
    assert costs.measured_rows(WIDE, HERE).ratios == ((8, 2.0), (64, 2.0))
    remember(WIDE, {1: 1.1})
    assert costs.measured_rows(WIDE, decoding).ratios[0] == (1, 1.1)


def test_a_measured_machine_overrules_what_ships_for_its_vendor(monkeypatch):
    """On Intel, decoding in fp32 stays with MKL until somebody has measured something better."""
    features = frozenset({"packed-linear"})
    intel = dataclasses.replace(host(), vendor="GenuineIntel", features=features)
    monkeypatch.setattr(costs, "host", lambda: intel)
    rule = Registry.installed()[PACKED]
    decoding = dataclasses.replace(HERE, backend=intel, decodes=True)
    one = Site("", linear())
    assert "MKL" in rule.too_slow(one, decoding).reason
    remember(WIDE, {1: 1.2, 8: 2.0})
    assert rule.too_slow(one, decoding) is None
    assert rule.measured(one, decoding).ratios == ((1, 1.2), (8, 2.0))


def test_attention_goes_by_its_own_figures_first():
    """Of a gated replacement: this machine's figures in place of the shipped ones."""
    name = "bloom.attention.scores"
    assert "this machine" not in str(costs.measured(name, HERE))
    remember(name, {32: 0.7, 128: 0.9, 512: 1.2})
    refused = costs.measured(name, HERE)
    assert refused.reason.startswith("does not pay: measured 0.70x at 32")
    remember(name, {128: 1.1, 512: 1.9})
    assert costs.measured(name, HERE).shortest == 128


def test_figures_of_another_machine_say_nothing(capable, monkeypatch):
    """Another processor, number of threads or torch; a backend that is not this one."""
    remember(WIDE, {8: 2.0})
    assert costs.measured_rows(WIDE, HERE)
    torch.set_num_threads(2)
    assert costs.measured_rows(WIDE, HERE) is None
    torch.set_num_threads(1)
    other = dataclasses.replace(HERE, backend=dataclasses.replace(capable, vendor="another"))
    assert costs.measured_rows(WIDE, other) is None
    monkeypatch.setattr(costs, "processor", lambda: "another")
    assert costs.measured_rows(WIDE, HERE) is None


def table_with(part):
    """A table with one part of some machine."""
    return json.dumps({"format": 1, "machines": {"m": {"k": part}}})


DAMAGED = {
    "empty": "",
    "cut short": '{"format": 1, "machines": {',
    "a list": "[]",
    "another format": '{"format": 2, "machines": {}}',
    "no ratios": table_with({"where": {"n": "w"}, "ratios": {"n": 1}}),
    "below zero": table_with({"where": {"n": "w"}, "ratios": {"n": {"8": -1}}}),
    "from nowhere": table_with({"where": {}, "ratios": {"n": {"8": 1.0}}}),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_table_is_said_and_ignored(content):
    """The plan is as without a table, and the next figures make a good one."""
    expected = optimus.plan(linear())
    remember(WIDE, {8: 0.5})
    costs.table_path().write_text(content)
    with pytest.warns(UserWarning, match=r"costs\.json is damaged and was ignored"):
        assert optimus.plan(linear()) == expected
    remember(WIDE, {8: 0.5})
    assert not optimus.plan(linear()).claims


def test_what_was_measured_before_is_kept():
    """Other names, other numbers and other machines; the date is that of the name's last."""
    remember(WIDE, {8: 1.5})
    other = json.loads(costs.table_path().read_text())
    other["machines"]["elsewhere"] = other["machines"][costs.machine()]
    costs.table_path().write_text(json.dumps(other))
    costs.record({KIND: {WIDE: {"64": 1.6}, GPT: {"8": 1.7}}}, "2026-03-04")
    table = json.loads(costs.table_path().read_text())["machines"]
    assert table["elsewhere"] == other["machines"]["elsewhere"]
    part = table[costs.machine()][KIND]
    assert part["ratios"] == {WIDE: {"8": 1.5, "64": 1.6}, GPT: {"8": 1.7}}
    assert part["where"][WIDE] == "this machine, 2026-03-04"
    assert [p.name for p in costs.table_path().parent.iterdir()] == ["costs.json"]


def test_what_takes_too_long_is_left():
    """A job that cannot end in time is not begun, and is named; the others are measured."""

    def start():
        return (lambda: time.sleep(0.002)), (lambda: time.sleep(0.001))

    quick = Job(KIND, "quick", 8, "rows", 1e3, start)
    slow = dataclasses.replace(quick, name="slow", operations=1e9)
    tuned = tune.tune([quick, slow], seconds=0.5)
    assert [(f.name, f.number) for f in tuned.figures] == [("quick", 8)]
    assert 1.2 < tuned.figures[0].ratio < 3
    assert tuned.left == (("slow, 8 rows", "no time left"),)


def test_attention_is_called_as_the_model_calls_it():
    """Two layers of the model's own sizes; the swap answers like stock at once."""
    config = zoo.build("bloom").config
    found = [job for job in tune.jobs(config) if job.unit == "keys"]
    assert [(job.name, job.number) for job in found if job.kind == KIND] == [
        ("bloom.attention.scores", keys) for keys in tune.KEYS
    ]
    with torch.inference_mode():
        stock, mine = found[0].start()
        torch.testing.assert_close(mine()[0], stock()[0])


def test_tune_without_a_model_has_usual_shapes():
    """With all numbers of rows, since nobody says whether the models will decode."""
    found = tune.jobs(None)
    assert {job.number for job in found} == set(tune.ROWS)
    assert f"{PACKED} 3072x768" in {job.name for job in found}


def test_a_cache_that_cannot_be_written(encoder, cache, capsys):
    """One line that names the file; exit code 2."""
    cache.write_text("a file where the folder should be")
    assert main(["tune", str(encoder), "--seconds", "0.01"]) == 2
    assert f"cannot write {costs.table_path()}" in capsys.readouterr().err
