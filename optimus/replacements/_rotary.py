"""Rotary embeddings in real arithmetic, under the model's own forward.

A rotary module makes complex tables and a function of its modeling file multiplies by them inside
attention. Nothing of either is copied or patched: both forwards run as they are, with ``Pairs``
where they make complex tensors. Between the modules goes one real tensor ``[..., 2]``, which
hooks, checkpointing and compilers of single layers take for what it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optimus.core.backend import Context, Mode
from optimus.core.errors import Refusal
from optimus.core.paths import Site
from optimus.core.replacement import Architecture, Mixin, Replacement
from optimus.core.surgery import Surgeon
from optimus.ops.rotary import Pairs, Reals
from optimus.replacements._families import targets

# Devices that have few complex operators, compiled or not.
WITHOUT_COMPLEX = frozenset({"hpu", "xla"})
COMPILED = frozenset({Mode.COMPILE, Mode.EXPORT})
# Two layers 1,024 wide, fp32, one thread, AVX-512, alternated; prompts of 64 and 512 tokens take
# 0.95x to 1.01x. Nothing was measured on other devices.
UNCOMPILED = "for compilers and exporters; uncompiled on a CPU it takes one token 0.83x to 0.97x"
# By which names attention is handed its table.
TABLES = ("position_embeddings", "freqs_ci")
PLACE = "_optimus_table"


@dataclass(frozen=True, slots=True)
class RealTables:
    """Complex buffers of a module, kept as real ones ``[..., 2]``; checkpoints see the complex."""

    names: tuple[str, ...]

    def _complex(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name in self.names:
            value = module._buffers[name]
            if value is not None:
                yield name, value if value.is_complex() else torch.view_as_complex(value)

    def fold(self, module: nn.Module) -> None:
        """The same memory, read as real numbers."""
        for name, value in self._complex(module):
            module._buffers[name] = _marked(torch.view_as_real(value), module._buffers[name])

    def unfold(self, module: nn.Module) -> None:
        """The same memory, read as complex numbers."""
        for name, value in self._complex(module):
            module._buffers[name] = _marked(value, module._buffers[name])

    def save(self, module: nn.Module, state: dict[str, Tensor], prefix: str) -> None:
        """A persistent one under its key."""
        for name, value in self._complex(module):
            if prefix + name in state:
                state[prefix + name] = value


def _marked(value: Tensor, like: Tensor | None) -> Tensor:
    """``value`` with the attributes of ``like``: ``nn.Buffer`` marks its tensors."""
    vars(value).update(vars(like))
    return value


class RealRotary(Mixin):
    """A module that makes rotary tables, or attention that multiplies by them."""

    @classmethod
    def accepts(cls, site: Site, context: Context) -> Refusal | None:
        if context.backend.name in WITHOUT_COMPLEX or context.mode in COMPILED:
            return None
        return Refusal(UNCOMPILED)

    @classmethod
    def setup(cls, module: nn.Module, surgeon: Surgeon) -> None:
        """Complex buffers become real, and the place of the table is looked up once."""
        found = module._buffers.items()
        names = tuple(name for name, value in found if value is not None and value.is_complex())
        if names:
            tables = RealTables(names)
            surgeon.fold(module, tables)
            surgeon.set_attribute(module, "bridges", (tables,))
        known = list(inspect.signature(type(module).forward).parameters)[1:]
        place = next(((known.index(name), name) for name in TABLES if name in known), None)
        surgeon.set_attribute(module, PLACE, place)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the original, with pairs of real numbers in the place of complex ones."""
        place = vars(self)[PLACE]
        if place is not None:
            args, kwargs = _paired(args, kwargs, *place)
        with Reals():
            out = super().forward(*args, **kwargs)  # type: ignore[misc]
        return out.stacked() if isinstance(out, Pairs) else out

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Moves and casts find the complex buffers: one to a real dtype spares them."""
        for bridge in self.bridges:
            bridge.unfold(self)  # type: ignore[arg-type]
        try:
            return super()._apply(*args, **kwargs)  # type: ignore[misc]
        finally:
            for bridge in self.bridges:
                bridge.fold(self)  # type: ignore[arg-type]


def _paired(
    args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if name in kwargs:
        return args, {**kwargs, name: Pairs.of(kwargs[name])}
    return (*args[:index], Pairs.of(args[index]), *args[index + 1 :]), kwargs


def rotary(model_type: str, *classes: str) -> Architecture:
    """The row of the classes that make the tables and of those that read them: all or none."""
    row = Replacement(
        name=f"{model_type}.rotary.real",
        targets=targets(model_type, classes),
        mixin=RealRotary,
        together=True,
    )
    return Architecture(model_type=model_type, replacements=(row,))
