"""Exports: what is written answers as the model did, and nothing is written otherwise."""

import importlib.util
import json
import stat

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import optimus
from optimus.cli import main
from optimus.core.errors import VerificationError
from optimus.core.planner import JOURNAL
from optimus.export import exporting, inputs, program, targets
from optimus.export.targets import TARGETS, ExportError, Target

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 50}
HEADS = {"num_attention_heads": 2, "max_position_embeddings": 40}
REPORT = {
    "target", "architecture", "folder", "bytes", "weights_bytes", "seconds", "claims",
    "tolerance", "figures", "error",
}  # fmt: skip


def tiny(kind=BertModel, config=BertConfig, **changes):
    """A model of one layer."""
    torch.manual_seed(0)
    return kind(config(**TINY, **HEADS, **changes)).eval()


def answers(model, folder, batch):
    """The largest difference of real tokens between a model and an export of it."""
    with torch.inference_mode():
        stock, mine = model(**batch)[0], program.Runner(folder)(**batch)[0]
    real = batch["attention_mask"].bool()
    return float((stock - mine)[real].abs().max())


@pytest.mark.parametrize(
    ("kind", "config"), [(BertModel, BertConfig), (LlamaForCausalLM, LlamaConfig)]
)
def test_an_export_serves_every_size(kind, config, tmp_path):
    """Of one text of one token, and of more than it was captured with; the model is untouched."""
    model = tiny(kind, config)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    report = exporting.export(model, tmp_path / "out", "torch-export")
    assert [one.size for one in report.figures] == ["1x1", "2x5", "3x16", "5x33", "8x40"]
    assert report.error <= report.tolerance == 1e-5
    like = inputs.traced(model)
    odd = inputs.ragged(like, 7, 23, words=50, pad=None)
    assert answers(model, tmp_path / "out", odd) < 1e-5
    assert JOURNAL not in vars(model)
    assert "forward" not in vars(model)
    assert type(model) is kind
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_transformers_reads_what_was_written(tmp_path):
    """The folder is one of transformers' own, with a record of ours and the usual rights."""
    from transformers.exporters.base import ExportedModel

    model = tiny()
    out = tmp_path / "out"
    report = exporting.export(model, out, "torch-export")
    batch = dict(inputs.traced(model))
    with program.quiet():
        theirs = ExportedModel.from_pretrained(str(out))(**batch).last_hidden_state
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(theirs[real], model(**batch).last_hidden_state[real])
    record = json.loads((out / exporting.RECORD).read_text())
    assert optimus.Plan.from_json(json.dumps(record["plan"])).context.mode.value == "export"
    assert record["export"]["bytes"] == report.bytes
    assert stat.S_IMODE(out.stat().st_mode) == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_complex_steps_are_exported_as_real_ones(tmp_path):
    """A model with rotary embeddings in complex numbers gives a graph without any."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    model = tiny(
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=8,
        first_k_dense_replace=1,
    )  # fmt: skip
    exporting.export(model, tmp_path / "out", "torch-export")
    graph = torch.export.load(str(tmp_path / "out" / "model.pt2")).graph_module
    values = [node.meta.get("val") for node in graph.graph.nodes]
    assert not any(isinstance(v, torch.Tensor) and v.is_complex() for v in values)


@pytest.mark.parametrize("name", ["onnx", "openvino", "executorch"])
def test_a_target_that_is_missing_names_its_extra(name, tiny_bert, tmp_path, capsys, monkeypatch):
    """One line that says what to install; nothing is loaded for it and nothing written."""
    found = importlib.util.find_spec
    hidden = TARGETS[name].needs
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda one: None if one in hidden else found(one)
    )
    assert main(["export", str(tiny_bert), str(tmp_path / "out"), "--to", name]) == 2
    assert f"pip install 'optimus[{name}]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_old_transformers_is_named(monkeypatch):
    """Exporters with runners are asked for, and not a version."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExportError, match="upgrade it"):
        Target("torch-export", "dynamo").demand()


def test_an_out_that_exists_is_kept(tiny_bert, tmp_path, capsys):
    """Refused before anything is loaded: a folder, a file, a dangling link."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("folder", "file", "link"):
        out = tmp_path / name
        assert main(["export", str(tiny_bert), str(out), "--to", "torch-export"]) == 2
        assert "exists" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("where", ["missing/out", "inside"])
def test_an_out_with_no_place_is_refused(where, tiny_bert, tmp_path, capsys):
    """In a folder that is none, or in the model's own."""
    out = tiny_bert / "out" if where == "inside" else tmp_path / where
    assert main(["export", str(tiny_bert), str(out), "--to", "torch-export"]) == 2
    assert str(out.parent) in capsys.readouterr().err
    assert not out.exists()


def test_other_answers_leave_nothing(tmp_path, monkeypatch):
    """An export that answers differently is an error, and its folder goes."""
    monkeypatch.setattr(exporting, "tolerated", lambda model: -1.0)
    with pytest.raises(VerificationError, match="Nothing was written"):
        exporting.export(tiny(), tmp_path / "out", "torch-export")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_midway_leaves_nothing(error, tmp_path):
    """A full disk is one clear error, and an interrupt stays one; neither leaves a folder."""

    def fail(folder):
        (folder / "half").write_text("half")
        raise error

    wanted = ExportError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(wanted), exporting.staged(tmp_path / "out") as folder:
        fail(folder)
    assert list(tmp_path.iterdir()) == []


def test_an_encoder_packs_in_its_graph(tmp_path):
    """Padding is not computed, and position 0 is as in stock also where it is padding."""
    model = tiny()
    report = exporting.export(model, tmp_path / "out", "torch-export")
    assert report.claims == {"bert.encoder.unpadded-graph": 1}
    batch = inputs.ragged(inputs.traced(model), 6, 20, words=50, pad=0)
    with torch.inference_mode():
        stock, mine = model(**batch), program.Runner(tmp_path / "out")(**batch)
    torch.testing.assert_close(mine.pooler_output, stock.pooler_output)
    padding = batch["attention_mask"][:, 1:] == 0
    assert not mine.last_hidden_state[:, 1:][padding].any()


def test_a_target_that_cannot_pack_gets_the_padded_graph(tmp_path):
    """The plan of the record says why the row was left out."""
    made = exporting._plan(tiny(), Target("x", "dynamo"))
    assert made.claims == ()
    assert any("x takes no size" in why.reason for _, _, why in made.refusals)


def test_what_cannot_be_captured_says_so(tmp_path):
    """A model that does not read text, and one whose forward asks a tensor for its value."""
    from transformers import ViTConfig, ViTModel

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(ExportError, match="pixel_values"):
        exporting.export(ViTModel(ViTConfig(**small)), tmp_path / "out", "torch-export")

    class Asking(BertModel):
        def forward(self, input_ids, attention_mask):
            if input_ids.sum().item() > 3:
                input_ids = input_ids + 0
            return super().forward(input_ids, attention_mask)

    with pytest.raises(ExportError, match="cannot export Asking to torch-export"):
        exporting.export(Asking(tiny().config).eval(), tmp_path / "out", "torch-export")
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_a_report(tiny_bert, tmp_path, capsys):
    """As JSON of known keys, or as a table; the tokenizer is beside the graph."""
    arguments = ["export", str(tiny_bert), "--to", "torch-export"]
    assert main([*arguments, str(tmp_path / "one"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == REPORT
    assert report["error"] <= report["tolerance"]
    assert (tmp_path / "one" / "tokenizer.json").is_file()
    assert main(["verify", str(tiny_bert), str(tmp_path / "one")]) == 0
    assert "the same answers" in capsys.readouterr().out


def test_positions_that_begin_behind_the_padding():
    """RoBERTa's table has two places more than its texts have tokens."""
    from transformers import RobertaConfig, RobertaModel

    assert inputs.longest(tiny(RobertaModel, RobertaConfig), TARGETS["onnx"]) == 38


def test_no_two_texts_are_as_long():
    """The batches are ragged, padded on both sides, and no text is empty."""
    batch = inputs.ragged(inputs.traced(tiny()), 8, 33, words=50, pad=0)
    counts = batch["attention_mask"].sum(1)
    assert len(counts.unique()) == 8
    assert counts.min() > 0
    assert bool((batch["attention_mask"][:, 0] == 0).any())
    assert bool((batch["attention_mask"][:, -1] == 0).any())
    assert bool((batch["input_ids"][batch["attention_mask"] == 0] == 0).all())


@pytest.mark.sweep
def test_a_compiled_package(tmp_path):
    """Compiled by inductor, run by torch's own loader."""
    report = exporting.export(tiny(), tmp_path / "out", "aoti")
    assert report.error <= report.tolerance


@pytest.mark.export
@pytest.mark.parametrize("name", ["onnx", "openvino", "executorch"])
@pytest.mark.parametrize(
    ("kind", "config"), [(BertModel, BertConfig), (LlamaForCausalLM, LlamaConfig)]
)
def test_the_runner_of_the_target(name, kind, config, tmp_path):
    """What is installed by its extra runs what was written, and answers the same."""
    targets.TARGETS[name].demand()
    report = exporting.export(tiny(kind, config), tmp_path / "out", name)
    assert report.error <= report.tolerance
