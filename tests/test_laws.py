"""Every law on every registered architecture, head, attention and recipe."""

import laws
import pytest
import torch
from models import EXPERTS, PLAIN, Case, case

from optimus.core.registry import Registry

pytestmark = pytest.mark.usefixtures("one_thread")


def cases() -> list[Case]:
    """Every head; the first and the last, which are unlike, also in bf16; the first in eager.

    Of the architectures that bring a model; rows without one have tests of their own.
    """
    found = []
    for architecture in Registry.installed().architectures:
        if architecture.tiny is None:
            continue
        heads = architecture.heads
        found += [Case(architecture, head) for head in heads]
        found += [
            Case(architecture, h, recipe="bf16") for h in dict.fromkeys([heads[0], heads[-1]])
        ]
        if architecture.replacements and architecture.model_type != PLAIN:
            found.append(Case(architecture, heads[0], attention="eager"))
    return found + [case(PLAIN, recipe=recipe) for recipe in laws.ROUNDING]


def first_heads(*recipes: str) -> list[Case]:
    """The cases of the first head of each architecture."""
    return [c for c in CASES if c.head == c.architecture.heads[0] and c.recipe in recipes]


def on(chosen):
    """Parametrise a test over cases."""
    return pytest.mark.parametrize("case", chosen, ids=str)


CASES = cases()
SETTLED = [c for c in CASES if c.attention == "default"]
FIRST, AUTO = first_heads("auto", "bf16", *laws.ROUNDING), first_heads("auto")
# Rounded experts, columns and tied heads; the plain cases stand for the rest.
HEAD = "AutoModelForCausalLM"
ROUNDED = [Case(EXPERTS, HEAD, recipe="int4"), case("gpt2", HEAD, recipe="int4")]
UNPADDED = [
    c for c in FIRST if any(r.name.endswith(".unpadded") for r in c.architecture.replacements)
]
NARROW = [Case(c.architecture, c.head, c.attention, dtype=torch.bfloat16) for c in AUTO]
# Heads that no file need name: whatever transformers builds on an encoder.
MORE = [
    Case(c.architecture, head)
    for c in AUTO
    for head in (
        "AutoModelForTokenClassification",
        "AutoModelForQuestionAnswering",
        "AutoModelForMultipleChoice",
        "AutoModelForPreTraining",
        "AutoModelForNextSentencePrediction",
    )
    if c.attention == "default" and c.can(head) and head not in c.architecture.heads
]
# Tracing takes seconds, and the eager switch is one piece of code for all.
EAGER = [case("bert", attention="eager"), case("gpt2", "AutoModelForCausalLM", attention="eager")]
GRAPHS = [c for c in AUTO if c.attention == "default"] + EAGER + [case(PLAIN, recipe="int8")]
# Two layers on one weight are left alone, and then nothing is left to round.
TIED = [c for c in SETTLED if not (c.is_plain and c.recipe in laws.ROUNDING)] + ROUNDED[1:]


@on(FIRST)
def test_silence(case, capable):
    """Plans touch nothing and claim nothing unknown."""
    laws.silence(case, capable)


@on(CASES + NARROW + MORE + ROUNDED)
def test_equivalence(case, capable):
    """Same answers."""
    laws.equivalence(case, capable)


@on(UNPADDED)
def test_equivalence_in_pieces(case, capable, monkeypatch):
    """Same answers when the batch goes through the encoder in pieces of whole sequences."""
    monkeypatch.setattr("optimus.replacements._unpadding.MOST_TOKENS", 5)
    laws.equivalence(case, capable)


@on(UNPADDED)
def test_padding_is_zero(case, capable):
    """Unpadded encoders leave zeros where there is no token."""
    laws.padding_is_zero(case, capable)


@on(SETTLED)
def test_keys(case, capable):
    """Same checkpoint."""
    laws.keys(case, capable)


@on(SETTLED + ROUNDED)
def test_loading(case, capable):
    """Stock checkpoints load."""
    laws.loading(case, capable)


@on(SETTLED + EAGER + NARROW + ROUNDED)
def test_returning(case, capable):
    """Bitwise reverse."""
    laws.returning(case, capable)


@on(CASES)
def test_training(case, capable):
    """Updates survive the reverse."""
    laws.training(case, capable)


@on(FIRST)
def test_idempotence(case, capable):
    """Once is enough, twice is refused."""
    laws.idempotence(case, capable)


@on(SETTLED + ROUNDED[:1])
def test_independence(case, capable):
    """Copies live alone."""
    laws.independence(case, capable)


@on(FIRST)
def test_neighbours(case, capable):
    """Nobody else notices."""
    laws.neighbours(case, capable)


@on(FIRST)
def test_company(case, capable):
    """Forward hooks see the stock model."""
    laws.company(case, capable)


@on([*AUTO, case(PLAIN, recipe="int4")])
def test_accelerate_hooks(case, capable):
    """accelerate's hooks come and go in any order."""
    laws.accelerate_hooks(case, capable)


@on(TIED)
def test_tying(case, capable):
    """Ties hold."""
    laws.tying(case, capable)


@on(GRAPHS)
def test_graph(case, capable):
    """No more graphs than stock."""
    laws.graph(case, capable)
