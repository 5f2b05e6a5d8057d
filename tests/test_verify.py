"""``optimus verify``: the same answers or not, by exit code, table and JSON."""

import json
import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from optimus.cli import main
from optimus.core.verify import CLOSE
from optimus.measure import compare

KEYS = {"ok", "tolerance", "data", "outputs", "layers", "reason", "agreement", "perplexities"}


@pytest.fixture(scope="module")
def llama(tiny_bert, tmp_path_factory):
    """A folder with a two-layer decoder that reads with the tiny BERT's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_bert)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def other(llama, tmp_path):
    """The same model with a layer that is a little off."""
    folder = tmp_path / "other"
    shutil.copytree(llama, folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight *= 1.5
    model.save_pretrained(folder)
    return folder


def verified(capsys, *arguments):
    """The exit code and the JSON."""
    code = main(["verify", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_model_is_like_itself(llama, capsys):
    """Bitwise: no error, no layer to blame, every word and the perplexity the same."""
    code, found = verified(capsys, llama, llama)
    assert code == 0
    assert found.keys() == KEYS
    assert found["outputs"] == {"logits": 0.0}
    assert (found["layers"], found["agreement"]) == ({}, 1.0)
    assert found["perplexities"][0] == found["perplexities"][1] > 1


def test_another_model_is_blamed_where_it_differs(llama, other, capsys):
    """The layer that was changed comes first; within a wider tolerance it is the same."""
    code, found = verified(capsys, llama, other)
    assert (code, found["ok"]) == (1, False)
    assert next(iter(found["layers"])) == "model.layers.1.mlp.down_proj"
    assert found["perplexities"][0] != found["perplexities"][1]
    error = found["outputs"]["logits"]
    assert verified(capsys, llama, other, "--tolerance", error * 2)[0] == 0


def test_the_table(llama, other, capsys):
    """What the JSON says, for people."""
    assert main(["verify", str(llama), str(other)]) == 1
    shown = capsys.readouterr().out
    assert "not the same answers" in shown
    assert "down_proj" in shown
    assert "perplexity" in shown


def test_data_of_ones_own(llama, other, tmp_path, capsys):
    """The texts of a file, which the report names."""
    file = tmp_path / "texts"
    file.write_text("the value of the list is to be\nif it is then return\n")
    code, found = verified(capsys, llama, llama, "--data", file)
    assert (code, found["data"]) == (0, str(file))


def test_without_words_a_probe_is_asked(llama, tmp_path, capsys):
    """No tokenizer: ids that mean nothing, no perplexity of them, and no file of texts."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(llama / name, bare)
    code, found = verified(capsys, bare, llama)
    assert (code, found["data"], found["perplexities"]) == (0, "a probe batch", None)
    assert main(["verify", str(bare), str(llama), "--data", "texts"]) == 2
    assert "tokenizer" in capsys.readouterr().err


def test_bad_input(llama, tmp_path, capsys):
    """No such folder, another vocabulary, an export that is cut short."""
    assert main(["verify", str(llama), str(tmp_path / "none")]) == 2
    small = tmp_path / "small"
    LlamaForCausalLM(
        LlamaConfig(vocab_size=7, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(small)
    assert main(["verify", str(llama), str(small)]) == 2
    assert "7" in capsys.readouterr().err
    (small / "export.json").write_text("{")
    assert main(["verify", str(llama), str(small)]) == 2
    assert "cannot run this export" in capsys.readouterr().err


def test_a_missing_output_is_not_the_same(capsys):
    """Its error is no number; JSON says null, and the answer is no."""
    from optimus.cli.verify import data

    found = compare.Comparison(CLOSE[torch.float32], "x", {"logits": float("inf")}, {})
    assert not found.ok
    assert json.loads(json.dumps(data(found)))["outputs"] == {"logits": None}


def test_nothing_to_compare_is_not_the_same():
    """No output at all proves nothing."""
    assert not compare.Comparison(CLOSE[torch.float32], "x", {}, {}).ok
