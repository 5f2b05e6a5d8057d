"""A small ragged batch to try a model on: real ids of its vocabulary, padded right and padded left.

Deterministic, and drawn without touching the global random state.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from optimus.core.paths import generates

LENGTH = 6
SHORTER = 4

Sample = Mapping[str, Tensor]


def describe_probe(model: nn.Module) -> str:
    """How the model will be checked, in words; begins with "not verified" where it cannot be."""
    why = _obstacle(model)
    if why:
        return f"not verified: no probe batch can be built ({why}) and no sample was given"
    return "a probe batch of ragged rows, padded right and padded left"


def probe(model: nn.Module) -> tuple[Sample, ...]:
    """Ragged ids ``[rows, 6]``; none where ``describe_probe`` says so.

    One batch for what generates. Two for encoders, whose route may depend on the side of the
    padding: a batch that mixes both would only ever take one.
    """
    if _obstacle(model):
        return ()
    full, right = (1,) * LENGTH, (1,) * SHORTER + (0,) * (LENGTH - SHORTER)
    left = right[::-1]
    if generates(model):
        return (_batch(model, (full, right, left)),)
    return _batch(model, (full, right)), _batch(model, (full, left))


def _obstacle(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    if config is None:
        return "a plain module"
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        return f"its input is {model.main_input_name}"
    if not isinstance(getattr(config, "vocab_size", None), int):
        return "its config names no vocabulary"
    accepted = inspect.signature(model.forward).parameters
    if not {"input_ids", "attention_mask"} <= accepted.keys():
        return "its forward takes no input_ids and attention_mask"
    return ""


def _batch(model: nn.Module, rows: tuple[tuple[int, ...], ...]) -> Sample:
    config: Any = model.config
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor(rows)
    ids = torch.randint(config.vocab_size, mask.shape, generator=generator)
    pad = getattr(config, "pad_token_id", None)
    if pad is not None:
        ids = torch.where(ids == pad, (ids + 1) % config.vocab_size, ids)
    ids = ids.masked_fill(mask == 0, pad or 0)
    device = next(model.parameters()).device
    batch = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = batch["input_ids"][:, :SHORTER]
    return batch
