"""Ragged batches of the sizes that an export has to serve, and what of their shape is free."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from optimus.core.probe import Sample, describe_probe, probe
from optimus.export.targets import ExportError, Target

# Texts x tokens. The first is the least there is, the last long enough to time.
SIZES = ((1, 1), (2, 5), (3, 16), (5, 33), (8, 128))


def traced(model: nn.Module) -> Sample:
    """The batch to capture the model with: several texts of several tokens, some of them padded.

    A size of 1 would be taken for a constant. ``ExportError`` for a model that does not read text.
    """
    batches = probe(model)
    if not batches:
        raise ExportError(f"cannot export a {type(model).__name__}: {describe_probe(model)}.")
    return batches[0]


def longest(model: nn.Module, target: Target) -> int:
    """The most tokens that a text may have."""
    config: Any = model.config
    known = getattr(config, "max_position_embeddings", None)
    if not isinstance(known, int) or known < 1:
        return target.tokens
    # RoBERTa and its kin count their positions from behind the padding's own.
    base = getattr(model, "base_model", model)
    table = getattr(getattr(base, "embeddings", None), "position_embeddings", None)
    offset = getattr(table, "padding_idx", None)
    return min(target.tokens, known if offset is None else known - offset - 1)


def free(sample: Sample, texts: int, tokens: int) -> dict[str, dict[int, Any]]:
    """For each input ``[texts, tokens]``: both sizes are free, up to the given ones."""
    rows = torch.export.Dim("texts", min=1, max=texts)
    read = torch.export.Dim("tokens", min=1, max=tokens)
    written = torch.export.Dim("written", min=1, max=tokens)
    return {name: {0: rows, 1: written if name.startswith("decoder_") else read} for name in sample}


def batches(model: nn.Module, like: Sample, most: int) -> dict[str, Sample]:
    """A ragged batch of each of the five sizes, by size; cut at ``most`` tokens."""
    config: Any = model.config
    sized = ((texts, min(tokens, most)) for texts, tokens in SIZES)
    return {
        f"{texts}x{tokens}": ragged(
            like, texts, tokens, words=config.vocab_size, pad=getattr(config, "pad_token_id", None)
        )
        for texts, tokens in sized
    }


def ragged(like: Sample, texts: int, tokens: int, *, words: int, pad: int | None) -> Sample:
    """A batch with the inputs of ``like``, ``[texts, tokens]``: no two texts as long, none empty.

    Every other text is padded on the left. Ids are of ``words`` words, and ``pad`` where nothing
    is.
    """
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(texts, tokens, dtype=torch.long)
    for row in range(1, texts):
        padding = min(row * tokens // texts, tokens - 1)
        place = slice(0, padding) if row % 2 else slice(tokens - padding, tokens)
        mask[row, place] = 0
    made: dict[str, Tensor] = {}
    for name in like:
        ids = torch.randint(words, mask.shape, generator=generator)
        ids = torch.where(ids == pad, (ids + 1) % words, ids) if pad is not None else ids
        made[name] = mask if name == "attention_mask" else ids.masked_fill(mask == 0, pad or 0)
    return made
