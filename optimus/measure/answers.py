"""What became of a side's answers, beside stock's: files of ``output`` and ``counts`` a batch.

``output`` is ``[tokens, features]`` of the real tokens with ``counts`` of them for each text, or
``[texts, features]`` from a head that gives one answer a text, without ``counts``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

SIMILARITY, AGREEMENT, PERPLEXITY = "cosine", "agreement", "perplexity"


def _pairs(side: Path, stock: Path) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    from safetensors.torch import load_file

    for path in sorted(stock.glob("*.safetensors")):
        reference = load_file(path)
        out = load_file(side / path.name)["output"]
        yield out, reference["output"], reference.get("counts")


def relative_error(side: Path, stock: Path) -> float:
    """‖out - ref‖ / ‖ref‖ over every real token of every batch."""
    difference = reference = 0.0
    for out, ref, _ in _pairs(side, stock):
        difference += float((out.double() - ref).square().sum())
        reference += float(ref.double().square().sum())
    return math.sqrt(difference / reference)


def smallest_cosine(side: Path, stock: Path) -> float:
    """Of the texts' embeddings, the means over their tokens: how far the worst one turned."""
    return min(
        float(torch.cosine_similarity(_pooled(out, n), _pooled(ref, n), dim=-1).min())
        for out, ref, n in _pairs(side, stock)
    )


def agreement(side: Path, stock: Path) -> float:
    """Share of texts, or of tokens where each has an answer, whose largest logit is the same."""
    same = total = 0
    for out, ref, _ in _pairs(side, stock):
        same += int((out.argmax(dim=-1) == ref.argmax(dim=-1)).sum())
        total += ref.shape[0]
    return same / total


def divergence(logits: Tensor, reference: Tensor) -> float:
    """Mean Kullback-Leibler divergence of ``[tokens, vocabulary]`` from stock's, in nats a token.

    It tells two roundings apart where their perplexities differ by less than luck does.
    """
    ours, theirs = logits.double().log_softmax(dim=-1), reference.double().log_softmax(dim=-1)
    return float((theirs.exp() * (theirs - ours)).sum(dim=-1).mean())


def _pooled(output: Tensor, counts: Tensor | None) -> Tensor:
    """``[texts, features]`` in double precision: near 1, a float's cosine has too few digits."""
    if counts is None:
        return output.double()
    return torch.stack([text.double().mean(dim=0) for text in torch.split(output, counts.tolist())])


JUDGES = {SIMILARITY: smallest_cosine, AGREEMENT: agreement}
