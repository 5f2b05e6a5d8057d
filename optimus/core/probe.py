"""A small ragged batch to try a model on: real ids of its vocabulary, padded right and padded left.

Deterministic, and drawn without touching the global random state.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor, nn

LENGTH = 8
LENGTHS = (8, 5)

Sample = Mapping[str, Tensor]


def describe_probe(model: nn.Module) -> str:
    """How the model will be checked, in words; begins with "not verified" where it cannot be."""
    why = _obstacle(model)
    if why:
        return f"not verified: no probe batch can be built ({why}) and no sample was given"
    return f"probe batches of {len(LENGTHS)} ragged rows, padded right and padded left"


def probe(model: nn.Module) -> tuple[Sample, ...]:
    """Two batches ``[2, 8]``, padded right and left; none where ``describe_probe`` says so."""
    if _obstacle(model):
        return ()
    return tuple(_batch(model, left=left) for left in (False, True))


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


def _batch(model: nn.Module, *, left: bool) -> Sample:
    config = model.config
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    vocabulary: int = config.vocab_size  # type: ignore[assignment,union-attr]
    pad = getattr(config, "pad_token_id", None)
    lengths = torch.tensor(LENGTHS)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    ids = torch.randint(vocabulary, (len(LENGTHS), LENGTH), generator=generator)
    ids = torch.where(ids == pad, (ids + 1) % vocabulary, ids) if pad is not None else ids
    ids = ids.masked_fill(mask == 0, pad or 0)
    if left:
        mask, ids = mask.flip(1), ids.flip(1)
    batch = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = batch["input_ids"][:, :4]
    return batch
