"""Changing a model, and remembering how.

Every mutation is an ``Edit``: a path, a slot and the values before and after, so that it can be
printed, copied with the model and undone. A ``Surgeon`` is a transaction over edits.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MethodType, TracebackType
from typing import Any, Protocol, Self, cast, runtime_checkable

from torch import Tensor, nn

from optimus.core.errors import SurgeryError
from optimus.core.memory import release
from optimus.core.paths import paths_of

# What FSDP says in its own classes; a forward there comes from transformers, which wraps those of
# every subclass of its layers.
OF_FSDP = ("__deepcopy__", "__module__")


class Slot(enum.Enum):
    """Which part of a module an edit changes."""

    CLASS = "class"
    PARAMETER = "parameter"
    ATTRIBUTE = "attribute"
    LAYOUT = "layout"


class Missing(enum.Enum):
    """There was nothing in the slot."""

    MISSING = "missing"


MISSING = Missing.MISSING


class Layout(Protocol):
    """A change of storage that knows its own inverse (the bridges of ``canonical``)."""

    def fold(self, module: nn.Module) -> None:
        """From the stock layout to this one."""

    def unfold(self, module: nn.Module) -> None:
        """Back to the stock layout, bit for bit."""


@runtime_checkable
class Kept(Protocol):
    """An original that waits elsewhere (``originals``)."""

    def merge(self, current: Tensor) -> nn.Parameter:
        """The original, with what was written into the value in use meanwhile."""


def set_class(module: nn.Module, new: type[nn.Module]) -> None:
    """Swap the class of ``module`` and keep what accelerate hung on the instance in step.

    accelerate's hooks store the bound forward as ``_old_forward`` and leave a bound ``forward``
    behind when they are removed; both belong to the class and follow it. A ``forward`` that
    someone else put there is not ours to shadow: ``SurgeryError``, before anything is changed.
    """
    forwards = {vars(c).get("forward") for k in (type(module), new) for c in k.__mro__}

    def ours(bound: object) -> bool:
        return (
            isinstance(bound, MethodType)
            and bound.__self__ is module
            and bound.__func__ in forwards
        )

    instance = vars(module)
    slot = "_old_forward" if "_old_forward" in instance else "forward"
    if slot in instance and not ours(instance[slot]):
        raise SurgeryError(
            f"{type(module).__name__}.{slot} was patched on this instance by something else. "
            "Remove that patch first, or skip this site in the recipe."
        )
    if slot == "_old_forward":
        instance[slot] = new.forward.__get__(module)
    else:
        instance.pop(slot, None)
    module.__class__ = new


def carries(live: type[nn.Module], cls: type[nn.Module]) -> bool:
    """Whether a module of class ``live`` is one of ``cls``, or one that FSDP made its own since."""
    stacked = "FSDPModule" in (c.__name__ for c in live.__bases__[0].__mro__)
    return live is cls or (stacked and live.__bases__[1:] == (cls,))


def _carried(live: type[nn.Module], old: type[nn.Module], new: type[nn.Module]) -> type[nn.Module]:
    """``live`` with ``new`` in the place of ``old``: FSDP's own class stays on top."""
    if live is old:
        return new
    metaclass: Any = type(live)
    body = {key: vars(live)[key] for key in OF_FSDP if key in vars(live)}
    return cast(type[nn.Module], metaclass(live.__name__, (live.__bases__[0], new), body))


@dataclass(frozen=True, slots=True)
class Edit:
    """One change, as data. ``before`` and ``after`` are MISSING where there was nothing."""

    path: str
    slot: Slot
    key: str
    before: object
    after: object

    def inverse(self) -> Edit:
        """The edit that undoes this one."""
        return Edit(self.path, self.slot, self.key, self.after, self.before)

    def apply(self, model: nn.Module) -> None:
        """Make the change on ``model``. A key is written in its place, so table order is kept."""
        module = model.get_submodule(self.path)
        match self.slot:
            case Slot.CLASS:
                before, after = (cast(type[nn.Module], c) for c in (self.before, self.after))
                self._expect(carries(type(module), before), module)
                set_class(module, _carried(type(module), before, after))
            case Slot.PARAMETER:
                module._parameters[self.key] = self._parameter(module)
            case Slot.ATTRIBUTE:
                _set_entry(vars(module), self.key, self.after)
            case Slot.LAYOUT:
                folded: Layout = self.before if self.after is MISSING else self.after  # type: ignore[assignment]
                (folded.unfold if self.after is MISSING else folded.fold)(module)
                release()

    def _parameter(self, module: nn.Module) -> nn.Parameter:
        if not isinstance(self.after, Kept):
            return cast(nn.Parameter, self.after)
        return self.after.merge(cast(nn.Parameter, module._parameters[self.key]))

    def _expect(self, holds: bool, module: nn.Module) -> None:
        if not holds:
            raise SurgeryError(
                f"{self.path or 'the model'} is a {type(module).__qualname__} that optimus did not "
                "put there: the tree was changed after the transform. Undo that change first "
                "(unload adapters, remove wrappers), then call again."
            )


def _set_entry(table: dict[str, object], key: str, value: object) -> None:
    if value is MISSING:
        table.pop(key, None)
    else:
        table[key] = value


class Surgeon:
    """A transaction: every change goes through it, and an exception inside the block undoes all.

    For mixins that round: ``kept`` has the original of every parameter that they replace, by its
    name, ``worth`` what calibration found, and ``codes`` what was rounded already, by the same
    name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.edits: list[Edit] = []
        self.kept: Mapping[str, Kept] = {}
        self.worth: Mapping[str, Tensor] = {}
        self.codes: Mapping[str, object] = {}
        self._paths = paths_of(model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            undo(self.model, self.edits)

    def reclass(self, module: nn.Module, cls: type[nn.Module]) -> None:
        """Derive the object: same object, new class."""
        self._do(module, Slot.CLASS, "", type(module), cls)

    def fold(self, module: nn.Module, layout: Layout) -> None:
        """Put the module's storage into another layout that has an exact inverse."""
        self._do(module, Slot.LAYOUT, type(layout).__name__, MISSING, layout)

    def set_parameter(
        self, owner: nn.Module, name: str, value: nn.Parameter, *, kept: Kept | None = None
    ) -> None:
        """Put ``value`` in the slot; with ``kept``, the original waits there and not here."""
        before = kept if kept is not None else owner._parameters[name]
        self._do(owner, Slot.PARAMETER, name, before, value)

    def set_attribute(self, owner: nn.Module, name: str, value: object) -> None:
        """Set a plain attribute of a module (not a parameter, buffer or child)."""
        self._do(owner, Slot.ATTRIBUTE, name, vars(owner).get(name, MISSING), value)

    def path(self, module: nn.Module) -> str:
        """Where the module is in the model."""
        return self._paths[module]

    def _do(self, owner: nn.Module, slot: Slot, key: str, before: object, after: object) -> None:
        edit = Edit(self._paths[owner], slot, key, before, after)
        # Recorded first: an interrupt between the two lines must find the edit in the list,
        # and undoing an edit that was not made is harmless.
        self.edits.append(edit)
        edit.apply(self.model)


def undo(model: nn.Module, edits: list[Edit]) -> None:
    """Apply the inverses, newest first, and forget them one by one."""
    while edits:
        edit = edits[-1]
        live, after = type(model.get_submodule(edit.path)), edit.after
        if edit.slot is not Slot.CLASS or carries(live, cast(type[nn.Module], after)):
            edit.inverse().apply(model)
        edits.pop()
