"""No graph breaks: decoders compile whole, in inference and in training, in few graphs."""

from __future__ import annotations

import warnings
from typing import Any

import decoders
import pytest
import sweep
import torch
from decoders import Decoder, Prompt, decoded
from models import batch, case
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import optimus
from optimus.core.planner import JOURNAL

pytestmark = pytest.mark.usefixtures("one_thread", "quiet")

CLOSE = 1e-5
# How far a compiled model may be from itself: roundings of products come in another order.
ITSELF = {"auto": 1e-5, "int8": 1e-5, "int4": 1e-5, "bf16": 0.02}
# How attention gets to a kernel: written by hand, with sinks, with narrow values.
KINDS = ("bloom", "gpt_oss-eager", "deepseek_v2")
# Stock itself does not compile whole: what it does that breaks its graph, in inference.
BREAKS = {
    "bark": "counts its positions by a length that the static cache keeps as a tensor",
    "fsmt": "branches on the numbers of its mask",
    "led": "logs an error where it pads its input",
    "longcat_flash": "goes through the experts that were hit, in a loop over a tensor",
    "mpt": "cuts its biases by a length that the static cache keeps as a tensor",
    "step3p5": "goes through the experts that were hit, in a loop over a tensor",
    "switch_transformers": "goes through the experts that were hit, in a loop over a tensor",
    "trocr": "counts its positions by a length that the static cache keeps as a tensor",
    "xglm": "counts its positions by a length that the static cache keeps as a tensor",
}
# Stock names no loss for these, and logs that it takes the usual one, which breaks its graph.
UNNAMED = {"gpt2"}
SHARES = 12


@pytest.fixture
def quiet():
    """What Dynamo and transformers warn of while they trace is their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def whole(model: nn.Module, backend: str = "eager") -> tuple[Any, CompileCounterWithBackend]:
    """The compiled model, of which no frame may break, and the count of its graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter, fullgraph=True), counter


def apart(mine: list[Tensor], stock: list[Tensor], prompt: Prompt) -> float:
    """The largest relative error, where there are words."""
    masks = (prompt.given.get(decoders.MASK), *[None] * decoders.STEPS)
    return max(
        sweep._apart(a.float(), b.float(), mask)
        for a, b, mask in zip(mine, stock, masks, strict=False)
    )


def compiled(model: nn.Module, prompt: Prompt, way: str = "fixed") -> tuple[list[Tensor], int]:
    """What it answers in whole graphs, and how many."""
    call, counter = whole(model)
    with torch.no_grad():
        return decoded(model, prompt, call, way), counter.frame_count


def eager(model: nn.Module, prompt: Prompt, way: str = "fixed") -> list[Tensor]:
    """What it answers without a compiler."""
    with torch.no_grad():
        return decoded(model, prompt, model, way)


@pytest.mark.parametrize("recipe", ITSELF)
def test_a_llama_is_two_graphs_by_every_recipe(recipe: str, capable):
    """A ragged prompt and two tokens: one graph for prompts and one for tokens, and no more."""
    stock = case("llama", "AutoModelForCausalLM").build(num_hidden_layers=1)
    prompt = Prompt(batch(stock, "left"), batch(stock, "left")["input_ids"][:, -2:])
    mine = case("llama", "AutoModelForCausalLM").build(num_hidden_layers=1)
    optimus.transform(mine, recipe, backend=capable, check=False)
    expected = eager(mine, prompt)
    answers, graphs = compiled(mine, prompt)
    assert graphs == 2
    assert apart(answers, expected, prompt) <= ITSELF[recipe]
    if recipe == "auto":
        assert apart(answers, eager(stock, prompt), prompt) <= CLOSE
        assert vars(mine)[JOURNAL].plan.claims


def test_each_kind_of_attention_compiles_whole(capable):
    """However a model's attention gets to its kernel."""
    for name in KINDS:
        model_type, _, attention = name.partition("-")
        compiles(Decoder(model_type, attention or None), capable)


def compiles(decoder: Decoder, capable: optimus.Backend) -> None:
    """In as few graphs as its shapes need, with stock's answers; or stock breaks as well."""
    stock = decoder.build()
    prompt, way = Prompt.of(stock), decoder.way
    if decoder.model_type in BREAKS:
        with pytest.raises(Exception, match=r"(?s)."):
            compiled(stock, prompt, way)
        return
    with sweep.measured_everywhere():
        mine = sweep.transformed(stock, "auto", capable)
    answers, graphs = compiled(mine, prompt, way)
    assert graphs <= {"alone": 1, "fixed": 2, "growing": 3}[way], decoder
    assert apart(answers, eager(stock, prompt, way), prompt) <= CLOSE, decoder
    if decoder.model_type in decoders.UNFIXED:
        with pytest.raises((RuntimeError, IndexError, KeyError)):
            eager(stock, prompt, "fixed")


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2"])
def test_training_compiles_whole(model_type: str, capable):
    """Forward, loss and backward without a break, and the gradients of stock."""
    stock, mine = (taught(model_type) for _ in range(2))
    if model_type in UNNAMED:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="loss_type"):
            gap(stock, stock)
        for model in (stock, mine):
            model.zero_grad()
            model.loss_type = "ForCausalLM"
    optimus.transform(mine, backend=capable, mode="training", check=False)
    assert gap(mine, stock) <= 1e-4


def taught(model_type: str) -> nn.Module:
    """A tiny model that drops nothing, ready to learn."""
    model = case(model_type, "AutoModelForCausalLM").build(num_hidden_layers=1).train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model


def gap(mine: nn.Module, stock: nn.Module) -> float:
    """How far the loss and gradients of the compiled model are from those of stock."""
    given = batch(stock)
    given["labels"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    call, counter = whole(mine, "aot_eager")
    losses = [model(**given).loss for model in (call, stock)]
    for loss in losses:
        loss.backward()
    assert counter.frame_count == 1
    pairs = zip(mine.parameters(), stock.parameters(), strict=True)
    far = [sweep._apart(a.grad, b.grad, None) for a, b in pairs if b.grad is not None]
    return max(*far, float((losses[0] - losses[1]).detach().abs()))


@pytest.mark.sweep
@pytest.mark.parametrize("share", range(SHARES))
def test_every_decoder_compiles_whole(share: int, capable):
    """Every registered one, with the attention that its row is for."""
    every = decoders.decoders()
    for decoder in every[share::SHARES]:
        compiles(decoder, capable)
    known = {decoder.model_type for decoder in every}
    assert known >= {*BREAKS, *decoders.UNFIXED, *decoders.ALONE}


@pytest.mark.sweep
def test_inductor_compiles_a_llama(capable):
    """The compiler that users have, on the smallest model."""
    stock = case("llama", "AutoModelForCausalLM").build(num_hidden_layers=1)
    prompt = Prompt(batch(stock, "left"), batch(stock, "left")["input_ids"][:, -2:])
    expected = eager(stock, prompt)
    optimus.transform(stock, backend=capable, check=False)
    torch._dynamo.reset()
    with torch.no_grad():
        answers = decoded(stock, prompt, torch.compile(stock, fullgraph=True))
    assert apart(answers, expected, prompt) <= CLOSE
