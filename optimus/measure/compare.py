"""Two models, the same answers? Errors by output and by layer, greedy words, perplexities.

Both run on the same text, in float32, read by the first one's tokenizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimus.core.paths import generates
from optimus.core.probe import probe
from optimus.core.verify import CLOSE, reference, verify
from optimus.export.folder import RECORD
from optimus.export.load import load as load_converted
from optimus.export.program import MANIFEST, Runner
from optimus.measure import load
from optimus.measure.perplexity import perplexity
from optimus.measure.text import Batch, batches, docstrings, read_texts

TEXTS = 16
BATCH, LENGTH = 4, 128
PROMPT, WORDS = 8, 16
WORST = 8
TOLERANCE = CLOSE[torch.float32]


@dataclass(frozen=True, slots=True)
class Comparison:
    """``outputs`` and ``layers``: relative error of the second against the first.

    A layer's is by how much it raised the error over all before it; the worst come first, and an
    exported graph has none. ``agreement``: the share of greedy words that are the same.
    """

    tolerance: float
    data: str
    outputs: dict[str, float]
    layers: dict[str, float]
    reason: str = ""
    agreement: float | None = None
    perplexities: tuple[float, float] | None = None

    @property
    def ok(self) -> bool:
        """Whether every output is within the tolerance."""
        errors = self.outputs.values()
        return not self.reason and bool(errors) and all(e <= self.tolerance for e in errors)


def compare(
    first: str, second: str, *, data: Path | None = None, tolerance: float = TOLERANCE
) -> Comparison:
    """Load both and run them on the texts of ``data``, or on docstrings; on a probe without words.

    ``LoadError`` where a model cannot be read, or they do not have the same vocabulary.
    """
    mine, theirs = load_either(first), load_either(second)
    _demand_same_words(first, mine, second, theirs)
    tokenizer = _tokenizer(first, needed=data is not None)
    if tokenizer is None:
        found, texts, what = [dict(one) for one in probe(mine)], [], "a probe batch"
    else:
        texts = read_texts(data) if data is not None else docstrings(TEXTS)
        found = batches(tokenizer, texts, size=BATCH, length=_longest(mine))
        what = str(data) if data is not None else f"{len(texts)} docstrings"
    if not found:
        raise load.LoadError(f"{first} does not read text, so there is nothing to ask it.")
    made = _answers(mine, theirs, found, tolerance, what)
    if not texts or not generates(mine) or getattr(mine.config, "is_encoder_decoder", False):
        return made
    tokens = [_ids(tokenizer, text) for text in texts]
    return replace(
        made,
        agreement=_agreement(mine, theirs, tokens),
        perplexities=(_perplexity(mine, tokens), _perplexity(theirs, tokens)),
    )


def load_either(source: str) -> nn.Module:
    """A model folder or hub id in float32, or what ``optimus export`` or ``convert`` wrote."""
    folder = Path(source).expanduser()
    if not (folder / MANIFEST).is_file():
        converted = (folder / RECORD).is_file()
        return load_converted(folder) if converted else load.load_model(source)
    try:
        return Runner(folder).eval()
    except Exception as error:  # each runtime has errors of its own for a bad file
        raise load.LoadError(f"{source}: cannot run this export: {error}") from error


def _tokenizer(source: str, *, needed: bool) -> Any:
    try:
        return load.load_tokenizer(source)
    except load.LoadError:
        if needed:
            raise
        return None


def _demand_same_words(first: str, mine: nn.Module, second: str, theirs: nn.Module) -> None:
    sizes = [getattr(one.config, "vocab_size", None) for one in (mine, theirs)]
    if sizes[0] != sizes[1]:
        raise load.LoadError(
            f"{first} knows {sizes[0]} words and {second} {sizes[1]}: they cannot be compared."
        )


def _longest(model: nn.Module) -> int:
    most = getattr(model.config, "max_position_embeddings", None)
    # Positions of RoBERTa's kin begin behind the padding's own.
    return min(LENGTH, most - 2) if isinstance(most, int) and most > 2 else LENGTH


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, truncation=True, max_length=LENGTH)["input_ids"]
    return ids


def _answers(
    mine: nn.Module, theirs: nn.Module, found: list[Batch], tolerance: float, what: str
) -> Comparison:
    outputs: dict[str, float] = {}
    layers: dict[str, float] = {}
    reason = ""
    sites = not isinstance(theirs, Runner)
    for batch in found:
        # Names and ties are no answers.
        before = replace(reference(mine, batch, sites=sites), keys=frozenset(), ties=())
        verdict = verify(theirs, before, tolerance=tolerance)
        reason = reason or verdict.reason
        for into, errors in ((outputs, verdict.drift), (layers, dict(verdict.sites))):
            for name, error in errors.items():
                into[name] = max(error, into.get(name, 0.0))
    # A layer that is given other rows, of packed tokens for one, has no error of its own.
    finite = [item for item in layers.items() if 0 < item[1] < math.inf]
    worst = sorted(finite, key=lambda item: -item[1])[:WORST]
    return Comparison(tolerance, what, outputs, dict(worst), reason)


def _agreement(mine: nn.Module, theirs: nn.Module, texts: list[list[int]]) -> float | None:
    """None for a graph without a cache, which does not generate, and without long prompts."""
    prompts = [ids[:PROMPT] for ids in texts if len(ids) >= PROMPT]
    if not prompts or isinstance(mine, Runner) or isinstance(theirs, Runner):
        return None
    ids = torch.tensor(prompts)
    options = {"do_sample": False, "max_new_tokens": WORDS, "min_new_tokens": WORDS}
    written = [
        one.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[:, PROMPT:]  # type: ignore[operator]
        for one in (mine, theirs)
    ]
    return float((written[0] == written[1]).double().mean())


def _perplexity(model: nn.Module, texts: list[list[int]]) -> float:
    length = _longest(model)
    found = perplexity(
        lambda batch: model(**batch).logits, texts, length=length, stride=max(1, length // 2)
    )
    return found.value
