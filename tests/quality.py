"""How good a model still is: what the accuracy tests and their benchmark measure it by."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import language_model
import torch
from torch import Tensor, nn

from optimus.measure.perplexity import perplexity

WINDOW, STRIDE, BATCH = 256, 128, 8
# Texts whose logits are compared: a vocabulary for each token takes memory.
COMPARED = 60

Ids = list[list[int]]


def trained() -> tuple[Any, Ids]:
    """The trained model, and its held-out texts as ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = language_model.folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return model, language_model.encoded(tokenizer, language_model.held_out())


def surprise(model: nn.Module, ids: Ids) -> float:
    """Its perplexity on the texts."""

    def forward(batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).logits

    return perplexity(forward, ids, length=WINDOW, stride=STRIDE, batch=BATCH).value


@torch.no_grad()
def logits(model: nn.Module, ids: Ids) -> Tensor:
    """``[tokens, vocabulary]`` of the first texts."""
    rows = (torch.tensor([one[:WINDOW]]) for one in ids[:COMPARED])
    return torch.cat([model(input_ids=row).logits[0] for row in rows])


def rounded(model: nn.Module, how: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy with the weight of every linear layer but the head rounded."""
    made = copy.deepcopy(model)
    for name, module in made.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.data = how(module.weight.data)
    return made


def to_nearest(weight: Tensor, group: int) -> Tensor:
    """Four bits, the scale of each group by its largest number: what a search has to beat."""
    groups = weight.unflatten(1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True) / 7
    return ((groups / scale).round() * scale).flatten(1)
