"""Tiny models of every registered architecture, seeded, and ragged batches to call them with."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from optimus.core.registry import Registry
from optimus.core.replacement import Architecture

LENGTH, LENGTHS = 9, (9, 4, 1)
FIRST_WORD, WORDS = 3, 99
PLAIN = "any"


@dataclass(frozen=True)
class Case:
    """One model and what is done to it. ``attention`` "default" is the host's own choice."""

    architecture: Architecture
    head: str
    attention: str = "default"
    recipe: str = "auto"
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        parts = (self.architecture.model_type, self.head, self.attention, self.recipe, dtype)
        return "-".join(parts)

    @property
    def is_plain(self) -> bool:
        """Whether it is a module without a config."""
        return self.architecture.model_type == PLAIN

    def can(self, head: str) -> bool:
        """Whether transformers has such a head for the architecture."""
        mapping = getattr(transformers, head)._model_mapping
        return not self.is_plain and type(self.architecture.tiny()) in mapping

    def build(self, *, seed: int = 0, **changes: Any) -> nn.Module:
        """A model of its own, with a config of its own; ``changes`` go into the config."""
        if changes:
            return _build(self, seed, changes)
        return copy.deepcopy(_built(self.architecture, self.head, self.attention, self.dtype, seed))


@functools.cache
def _built(
    architecture: Architecture, head: str, attention: str, dtype: torch.dtype, seed: int
) -> nn.Module:
    return _build(Case(architecture, head, attention, dtype=dtype), seed, {})


def _build(case: Case, seed: int, changes: dict[str, Any]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = case.architecture.tiny()
        if isinstance(made, tuple):
            model = made[0]
        else:
            config = copy.deepcopy(made)
            for key, value in changes.items():
                setattr(config, key, value)
            chosen = {} if case.attention == "default" else {"attn_implementation": case.attention}
            model = getattr(transformers, case.head).from_config(config, **chosen)
        stir(model)
    return model.to(case.dtype).eval()


def stir(model: nn.Module) -> None:
    """Weights large enough that attention has preferences, and no bias that is zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.06)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))


def architecture(model_type: str) -> Architecture:
    """The registered architecture of that type that brings a tiny model."""
    known = Registry.installed().architectures
    return next(a for a in known if a.model_type == model_type and a.tiny is not None)


def case(model_type: str, head: str = "AutoModel", **choices: Any) -> Case:
    """A case by name."""
    return Case(architecture(model_type), head, **choices)


class Stranger(nn.Module):
    """Layers that no replacement names, under a name that one does."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(256, 512, 3), nn.LayerNorm(512)
        self.table = nn.Embedding(512, 512)


Stranger.__qualname__ = Stranger.__name__ = "BertModel"


def overriding(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass with a forward of its own: a changed remote-code model."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return super(made, self).forward(*args, **kwargs)

    made = type(cls.__name__, (cls,), {"forward": forward, "__module__": __name__})
    return made


def mixtral() -> Any:
    """Two layers of four experts, wide enough to round."""
    return transformers.MixtralConfig(
        vocab_size=99,
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )


EXPERTS = Architecture(model_type="mixtral", replacements=(), tiny=mixtral)


@dataclass(frozen=True)
class Call:
    """Arguments for one forward; ``mask`` says which positions have a defined answer."""

    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mask: Tensor | None

    def __call__(self, model: nn.Module) -> Any:
        """What ``model`` answers, or the type of the exception that it raises."""
        args = tuple(_cast(value, model) for value in self.args)
        kwargs = {key: _cast(value, model) for key, value in self.kwargs.items()}
        try:
            with torch.no_grad():
                return model(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            return type(error)


def _cast(value: Any, model: nn.Module) -> Any:
    """Float inputs in the model's own dtype, as its caller would make them."""
    dtype = next(model.parameters()).dtype
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if floats else value


def masks() -> dict[str, Tensor | None]:
    """Every way in which a batch is padded, or not."""
    right = (torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]).long()
    hole = torch.ones(3, LENGTH, dtype=torch.long)
    hole[0, 2:5] = hole[2, 1:8] = 0
    empty_row = right.clone()
    empty_row[1] = 0
    return {
        "none": None,
        "ones": torch.ones(3, LENGTH, dtype=torch.long),
        "right": right,
        "left": right.flip(1),
        "hole": hole,
        "empty-row": empty_row,
        "single": torch.ones(1, 1, dtype=torch.long),
        "empty": torch.ones(0, LENGTH, dtype=torch.long),
    }


def words(mask: Tensor | None, pad: int) -> Tensor:
    """Real ids ``[batch, length]``; ``pad`` where the mask is zero."""
    shape = (3, LENGTH) if mask is None else tuple(mask.shape)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(FIRST_WORD, WORDS, shape, generator=generator)
    return ids if mask is None else ids.masked_fill(mask == 0, pad)


def pad_of(model: nn.Module) -> int:
    """The id that the model takes for padding."""
    return getattr(model.config, "pad_token_id", None) or 0


def batch(model: nn.Module, kind: str = "right") -> dict[str, Tensor]:
    """Ids and mask of that kind; for a plain module its own input."""
    if not hasattr(model, "config"):
        dtype = next(model.parameters()).dtype
        return {"input": torch.linspace(-1, 1, 4 * 256, dtype=dtype).view(4, 256)}
    mask = masks()[kind]
    ids = {"input_ids": words(mask, pad_of(model))}
    return ids if mask is None else ids | {"attention_mask": mask}


def calls(model: nn.Module) -> Iterator[Call]:
    """Every batch, and the right-padded one with every option that the forward knows."""
    if not hasattr(model, "config"):
        yield from _plain_calls()
        return
    if type(model).__name__.endswith("ForMultipleChoice"):
        choices = {k: v[None] for k, v in batch(model).items()}
        yield Call("choices", (), choices, None)
        return
    for kind, mask in masks().items():
        yield Call(kind, (), batch(model, kind), mask)
    mask = masks()["right"]
    assert mask is not None
    usual = batch(model)
    wild = {**usual, "input_ids": words(None, 0)}
    yield Call("words-under-the-mask", (), wild, mask)
    square = mask.bool()[:, None, None].expand(3, 1, LENGTH, LENGTH)
    others = {"boolean": mask.bool(), "float": mask.float(), "square": square, "row": mask[:1]}
    for label, other in others.items():
        yield Call(f"{label}-mask", (), {**usual, "attention_mask": other}, mask)
    known = inspect.signature(model.forward).parameters
    if list(known)[:2] == ["input_ids", "attention_mask"]:
        yield Call("positional", (usual["input_ids"], mask), {}, mask)
    for label, extra in _options(model, usual, mask).items():
        if extra.keys() <= known.keys() or "kwargs" in known:
            kwargs = {key: v for key, v in (usual | extra).items() if v is not None}
            yield Call(label, (), kwargs, mask)


def _options(model: nn.Module, usual: dict[str, Tensor], mask: Tensor) -> dict[str, dict[str, Any]]:
    ids = usual["input_ids"]
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids).detach()
    labels = {
        "ForSequenceClassification": torch.tensor([0, 1, 1]),
        "ForTokenClassification": ids.masked_fill(mask == 0, -100).clamp(max=1),
        "ForMaskedLM": ids.masked_fill(mask == 0, -100),
        "ForCausalLM": ids.masked_fill(mask == 0, -100),
    }
    given = next((v for k, v in labels.items() if type(model).__name__.endswith(k)), None)
    backwards = torch.arange(LENGTH).flip(0)[None]
    options: dict[str, dict[str, Any]] = {
        "hidden-states": {"output_hidden_states": True},
        "some-hidden-states": {"output_hidden_states": [0, -1]},
        "attentions": {"output_attentions": True},
        "embeds": {"input_ids": None, "inputs_embeds": embeds},
        "position-row": {"position_ids": backwards},
        "positions": {"position_ids": backwards.expand(3, LENGTH)},
        "token-types": {"token_type_ids": (torch.arange(LENGTH) % 2).expand(3, LENGTH)},
        "tuple": {"return_dict": False},
        "tuple-of-all": {"return_dict": False, "output_hidden_states": True},
    }
    known = inspect.signature(model.forward).parameters
    if "token_type_ids" not in known or getattr(model.config, "type_vocab_size", 0) < 2:
        del options["token-types"]
    return options if given is None else options | {"labels": {"labels": given}}


def _plain_calls() -> Iterator[Call]:
    rows = torch.linspace(-1, 1, 12 * 256).view(3, 4, 256)
    shapes = {
        "one-row": rows[0, :1],
        "vector": rows[0, 0],
        "rows": rows[0],
        "three-dimensions": rows,
        "strided": rows.transpose(0, 1),
        "every-second": rows[:, ::2],
        "no-row": rows[0, :0],
        "too-narrow": rows[..., :7],
    }
    for label, value in shapes.items():
        yield Call(label, (value,), {}, None)


def nudged(model: nn.Module, seed: int) -> nn.Module:
    """The model, each weight moved up or down by its last bit."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            up = torch.rand(weight.shape, generator=generator) < 0.5
            weight.copy_(torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf).to(weight)))
    return model
