"""Perplexity of a decoder, as transformers' page on fixed-length models defines it.

A text longer than the window is read in windows that overlap, so that every token but the first of
a text is scored once, with at least ``length - stride`` tokens before it where the text has them.
The mean is over tokens. Texts are documents of their own: none is context for another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optimus.measure.text import Batch


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that are read, of which the last ``scored`` are predicted."""

    ids: tuple[int, ...]
    scored: int


@dataclass(frozen=True, slots=True)
class Perplexity:
    """``exp`` of the mean negative log likelihood of ``tokens`` tokens."""

    value: float
    tokens: int


def windows(ids: list[int], *, length: int, stride: int) -> Iterator[Window]:
    """The windows of one text: ``length`` tokens, each begins ``stride`` after the one before."""
    end = 1  # the first token has nothing to be predicted from
    for begin in range(0, len(ids), stride):
        stop = min(begin + length, len(ids))
        if stop > end:
            yield Window(tuple(ids[begin:stop]), stop - end)
        end = max(stop, end)


@torch.inference_mode()
def perplexity(
    forward: Callable[[Batch], Tensor],
    texts: list[list[int]],
    *,
    length: int,
    stride: int,
    batch: int = 1,
) -> Perplexity:
    """Of a ``forward`` to logits ``[texts, tokens, vocabulary]``, over texts as token ids.

    Not a number where no text has two tokens.
    """
    if not 0 < stride < length:
        # Without overlap, the first token of a window would be predicted from nothing.
        raise ValueError(f"stride {stride} must be 1 or more and less than length {length}")
    parts = [one for ids in texts for one in windows(ids, length=length, stride=stride)]
    total = sum(
        _surprise(forward, parts[start : start + batch]) for start in range(0, len(parts), batch)
    )
    tokens = sum(part.scored for part in parts)
    if not tokens or not math.isfinite(total):
        return Perplexity(math.nan, tokens)
    mean = total / tokens
    # Beyond this a float has no exponent left: the model knows nothing, and that is the answer.
    return Perplexity(math.exp(mean) if mean < 700 else math.inf, tokens)


def _surprise(forward: Callable[[Batch], Tensor], parts: list[Window]) -> float:
    """The summed negative log likelihood of what the windows score; padded on the right."""
    widest = max(len(part.ids) for part in parts)
    ids = torch.zeros(len(parts), widest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    targets = torch.full_like(ids, -100)
    for row, part in enumerate(parts):
        size = len(part.ids)
        ids[row, :size] = torch.tensor(part.ids)
        mask[row, :size] = 1
        targets[row, size - part.scored : size] = ids[row, size - part.scored : size]
    logits = forward({"input_ids": ids, "attention_mask": mask})
    losses = (
        nn.functional.cross_entropy(
            row[:-1].float(), target[1:].to(row.device), ignore_index=-100, reduction="sum"
        )
        for row, target in zip(logits, targets, strict=True)
    )
    return float(sum(loss.double() for loss in losses))
