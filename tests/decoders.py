"""Every registered decoder, tiny, and a ragged prompt and two more tokens through each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sweep
import torch
import zoo
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache
from zoo.models import build_from

from optimus.core.registry import Registry

STEPS = 2
# What a cache of fixed room does to stock itself, before any compiler.
UNFIXED = {
    "deepseek_v4": "its layers are of kinds that transformers' static cache does not know",
    "git": "its image is written into the cache before the words, and has no room there",
    "inkling": "its short convolutions take as many keys as there are",
    "inkling2": "its short convolutions take as many keys as there are",
    "inkling_text": "its short convolutions take as many keys as there are",
    "opt": "its positions are counted by the mask, which must not be longer than the words",
}
# Those that take no cache of transformers', or no mask beside one.
ALONE = {
    "cpmant": "its mask counts a prompt of its own",
    "minimax": "it has a cache of its own kind",
}
MASK, CACHE, WORDS = "attention_mask", "past_key_values", "input_ids"


@dataclass(frozen=True)
class Decoder:
    """A model type, by the attention that its row is for (None: the host's own choice)."""

    model_type: str
    attention: str | None = None

    def __str__(self) -> str:
        return "-".join(filter(None, (self.model_type, self.attention)))

    @property
    def way(self) -> str:
        """How it can be decoded: on a cache of fixed room, a growing one, or its prompt alone."""
        if zoo.tiny(self.whole).is_encoder_decoder or self.model_type in ALONE:
            return "alone"
        return "growing" if self.model_type in UNFIXED else "fixed"

    @property
    def whole(self) -> str:
        """The type that can be built."""
        return sweep.WITHIN.get(self.model_type, self.model_type)

    def build(self) -> nn.Module:
        """A tiny one, whose heads share keys where its row is about that."""
        config = zoo.tiny(self.whole)
        if any(r.model_type == self.model_type and r.group == "GQA" for r in sweep.rows()):
            sweep.shared(config)
        return build_from(config, zoo.heads(self.whole)[0], self.attention, torch.float32, 0)


@functools.cache
def decoders() -> list[Decoder]:
    """Of every registered row, those that write a token from the ones before it."""
    found: dict[Decoder, None] = {}
    for one in Registry.installed().architectures:
        if writes(one.model_type):
            found |= {Decoder(one.model_type, asked(r.name)): None for r in one.replacements}
    return list(found)


def asked(name: str) -> str | None:
    """How a row's models are loaded: those of some are on SDPA unless somebody asks for eager."""
    return "eager" if name.endswith(".attention.fused") else None


def writes(model_type: str) -> bool:
    """Whether its tiny model decodes: it takes what it has read before, and reads one way."""
    whole = sweep.WITHIN.get(model_type, model_type)
    if whole not in zoo.model_types() or whole in zoo.NEEDS or whole in zoo.CANNOT:
        return False
    heads = zoo.heads(whole)
    known = inspect.signature(model_class(whole, heads[0]).forward).parameters
    return "AutoModelForMaskedLM" not in heads and CACHE in known and WORDS in known


@functools.cache
def model_class(model_type: str, head: str) -> type[nn.Module]:
    """What an auto class makes of that type."""
    return type(zoo.build(model_type, head=head))


@dataclass(frozen=True)
class Prompt:
    """A left-padded batch, the room that its cache has, and the tokens that follow."""

    given: dict[str, Tensor]
    following: Tensor

    @classmethod
    def of(cls, model: nn.Module) -> Prompt:
        """One that the model answers to."""
        given = zoo.inputs(model, padding="left")
        words = given[WORDS]
        return cls(given, words[:, -STEPS:].flip(1))

    @property
    def length(self) -> int:
        """How many tokens the prompt has."""
        return self.given[WORDS].shape[1]

    def mask(self) -> Tensor:
        """Of the prompt and all that will follow."""
        mask = self.given[MASK]
        return torch.cat((mask, mask.new_ones(len(mask), STEPS)), 1)


def decoded(
    model: nn.Module, prompt: Prompt, call: Callable[..., Any], way: str = "fixed"
) -> list[Tensor]:
    """The logits of the prompt and of each token after it, by ``call`` on the model's arguments.

    On a cache of fixed room, masks are of fixed length, too: shapes stay.
    """
    if way == "alone":
        return [call(**prompt.given, use_cache=False)[0]]
    static = way == "fixed"
    cache = room(model, prompt.length + STEPS) if static else growing(model)
    given, mask = dict(prompt.given), prompt.mask() if MASK in prompt.given else None
    if static and mask is not None:
        given[MASK] = mask
    answers = [call(**given, **{CACHE: cache}, use_cache=True)[0]]
    for step in range(STEPS):
        end = prompt.length + step + 1
        one = {k: v for k, v in given.items() if k not in (WORDS, MASK, "token_type_ids")}
        one[WORDS] = prompt.following[:, step : step + 1]
        if mask is not None:
            one[MASK] = mask if static else mask[:, :end]
        answers.append(call(**one, **{CACHE: cache}, use_cache=True)[0])
    return answers


def room(model: nn.Module, length: int) -> Any:
    """A static cache."""
    return StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=length)


def growing(model: nn.Module) -> Any:
    """A dynamic cache."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))
