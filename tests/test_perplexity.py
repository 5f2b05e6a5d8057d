"""Perplexity by its definition, what bench prints of it, and the accuracy of every recipe.

The last need the trained model (``language_model``) and run by ``make accuracy``.
"""

import copy
import json
import math
import shutil
from pathlib import Path

import language_model
import pytest
import quality
import torch
from safetensors.torch import save_file

import optimus
from optimus.cli import main
from optimus.core.backend import host
from optimus.measure import answers
from optimus.measure.perplexity import Window, perplexity, windows
from optimus.ops.quantized import INT4, QuantizedWeight

# How much the perplexity may grow, by recipe.
LINES = {"auto": 1e-4, "bf16": 0.005, "int8": 0.005, "int8-dynamic": 0.01, "int4": 0.03}
HERE = [name for name in LINES if name != "bf16" or "native-bf16" in host().features]
# Searched scales leave this share of the divergence that rounding to nearest causes, or less.
SEARCHED = 0.85


@pytest.fixture(scope="module")
def tiny():
    """A Llama of one layer, for ids below 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32, num_attention_heads=2, **sizes, initializer_range=0.5)
    return LlamaForCausalLM(config).eval()


def by_hand(model, ids, length, stride):
    """The loop of transformers' page: the summed loss, and how many tokens it is of."""
    total = scored = end = 0
    for begin in range(0, len(ids), stride):
        stop = min(begin + length, len(ids))
        given = torch.tensor([ids[begin:stop]])
        labels = given.clone()
        labels[:, : -(stop - end)] = -100
        tokens = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(model(input_ids=given, labels=labels).loss) * tokens
        scored, end = scored + tokens, stop
        if stop == len(ids):
            return total, scored
    raise AssertionError("the last window reaches the end")


@pytest.mark.parametrize(("length", "stride"), [(8, 4), (8, 3), (40, 20)])
def test_perplexity_is_what_transformers_documents(tiny, length, stride):
    """Two texts, longer and shorter than the window, weighted by their tokens; padded alike."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(32, (n,), generator=generator).tolist() for n in (23, 5)]
    losses = [by_hand(tiny, ids, length, stride) for ids in texts]
    expected = math.exp(sum(loss for loss, _ in losses) / sum(n for _, n in losses))
    for batch in (1, 3):
        found = perplexity(
            lambda given: tiny(**given).logits, texts, length=length, stride=stride, batch=batch
        )
        assert found.tokens == 22 + 4
        assert found.value == pytest.approx(expected, rel=1e-5)


def test_every_token_but_the_first_is_scored_once():
    """Windows overlap by what the stride leaves, and the last is not repeated."""
    made = list(windows(list(range(10)), length=6, stride=3))
    assert made == [
        Window((0, 1, 2, 3, 4, 5), 5),
        Window((3, 4, 5, 6, 7, 8), 3),
        Window((6, 7, 8, 9), 1),
    ]


def test_what_has_no_perplexity():
    """Texts of one token, answers that are not numbers; windows that do not overlap are refused."""

    def nothing(batch):
        return torch.full((*batch["input_ids"].shape, 4), math.nan)

    assert math.isnan(perplexity(nothing, [[1], []], length=8, stride=4).value)
    assert math.isnan(perplexity(nothing, [[1, 2]], length=8, stride=4).value)
    with pytest.raises(ValueError, match="less than length"):
        perplexity(nothing, [[1, 2]], length=8, stride=8)


def test_answers_are_judged_against_stock(tmp_path):
    """Embeddings by the text that turned most, logits by how many keep their largest."""
    stock, side = tmp_path / "stock", tmp_path / "side"
    hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
    turned = hidden.clone()
    turned[2] = torch.tensor([1.0, 1.0])
    for folder, output in ((stock, hidden), (side, turned)):
        folder.mkdir()
        save_file({"output": output, "counts": torch.tensor([2, 1])}, folder / "0.safetensors")
    assert answers.smallest_cosine(stock, stock) == pytest.approx(1)
    assert answers.smallest_cosine(side, stock) == pytest.approx(math.sqrt(0.5))
    assert answers.agreement(side, stock) == 1
    save_file({"output": 1 - turned, "counts": torch.tensor([2, 1])}, side / "0.safetensors")
    assert answers.agreement(side, stock) == pytest.approx(1 / 3)
    assert answers.divergence(hidden, hidden + 3) == pytest.approx(0, abs=1e-12)
    assert answers.divergence(turned, hidden) > 0.1


def test_bench_prints_the_perplexity_of_a_decoder(tiny_bert, tmp_path, capsys):
    """Beside its speed, for every side that runs; JSON also says of how many tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(shutil.copytree(tiny_bert, tmp_path / "decoder"))
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    LlamaForCausalLM(LlamaConfig(vocab_size=rows, **sizes)).save_pretrained(folder)
    texts = tmp_path / "texts"
    texts.write_text("the value of the list is to be\nif\nreturn it then if it is the value\n")
    command = ["bench", str(folder), "--data", str(texts), "--length", "6", "--runs", "1"]
    assert main([*command, "--recipe", "int8", "--json"]) == 0
    stock, int8 = json.loads(capsys.readouterr().out)["sides"]
    assert stock["scored_tokens"] == int8["scored_tokens"] == 9 + 2 + 9
    assert int8["perplexity_change"] == int8["perplexity"] / stock["perplexity"] - 1
    assert 0 < abs(int8["perplexity_change"]) < 0.01


@pytest.fixture(scope="module")
def trained():
    """The trained model, and its held-out texts as ids."""
    return quality.trained()


@pytest.fixture(scope="module")
def unquantized(trained):
    """What the recipes are measured against."""
    return quality.surprise(*trained)


@pytest.mark.accuracy
def test_the_trained_model_has_learnt(unquantized):
    """A third of what knowing only the tokens' frequencies comes to, or less."""
    assert unquantized < language_model.unigram_perplexity() / 3


@pytest.mark.accuracy
@pytest.mark.parametrize("recipe", HERE)
def test_perplexity_of_a_recipe(trained, unquantized, recipe):
    """Within its line of the unquantized model."""
    model, ids = trained
    mine = optimus.transform(copy.deepcopy(model), recipe)
    assert quality.surprise(mine, ids) <= unquantized * (1 + LINES[recipe])


@pytest.mark.accuracy
def test_searched_scales_are_better_than_rounding_to_nearest(trained):
    """The same layers at 4 bits in groups of 32: the divergence from the unquantized model."""
    model, ids = trained
    stock = quality.logits(model, ids)
    nearest, searched = (
        answers.divergence(quality.logits(quality.rounded(model, how), ids), stock)
        for how in (
            lambda weight: quality.to_nearest(weight, INT4.group),
            lambda weight: QuantizedWeight(weight, INT4).dense(),
        )
    )
    assert 0 < searched <= SEARCHED * nearest
