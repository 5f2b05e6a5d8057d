"""One parameter of a module as codes: folding, lending, loading and giving the original back.

The module holds codes and scales; the original waits where the recipe's ``keep`` says. A parameter
that another module shares stays where it is, and only its codes are new.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from optimus.core.canonical import Canonical, Placeholder, like, placeholder
from optimus.core.memory import evict
from optimus.core.originals import Original
from optimus.core.surgery import Surgeon
from optimus.replacements._linear import LOCK, PATIENCE


class Codes(Protocol):
    """A rounded parameter in one of the layouts that products know."""

    dtype: torch.dtype

    def dense(self) -> Tensor:
        """The rounded values, newly allocated."""


C = TypeVar("C", bound=Codes)


@dataclass(slots=True, eq=False)
class State(Generic[C]):
    """What stands for one parameter.

    ``codes`` are those of ``original``, ``packed`` the same unless the dense weight is lent.
    Without an original, ``shared`` is the parameter in the table that they were made of, and
    ``written`` its version then. ``given`` are codes that a checkpoint brought, until the fold.
    """

    original: Original | None
    worth: Tensor | None = None
    packed: C | None = None
    codes: C | None = None
    lent: int = 0
    shared: nn.Parameter | None = None
    written: int = 0
    given: C | None = None


def _version(weight: Tensor) -> int:
    """Changes with every write into the tensor that torch knows of."""
    return 0 if weight.is_inference() else weight._version


class Rounding(Generic[C]):
    """The bridge between a dense parameter and its codes."""

    def __init__(self, key: str) -> None:
        self.key, self.slot = key, f"_{key}_state"

    def fits(self, module: nn.Module, weight: nn.Parameter) -> bool:
        """Whether this weight (moved, recast, rewritten) can be rounded."""
        raise NotImplementedError

    def round(self, module: nn.Module, weight: Tensor, worth: Tensor | None) -> C:
        """The codes of a dense weight in the stock layout."""
        raise NotImplementedError

    def retyped(self, codes: C, dtype: torch.dtype) -> C:
        """The same codes of a weight of another dtype."""
        raise NotImplementedError

    def opened(self, module: nn.Module, codes: C) -> Tensor:
        """The rounded values in the stock layout, newly allocated."""
        raise NotImplementedError

    def prepare(self, module: nn.Module, surgeon: Surgeon) -> None:
        """Take the original from the keeper, and fold."""
        name = f"{surgeon.path(module)}.{self.key}".lstrip(".")
        original = cast("Original | None", surgeon.kept.get(name))
        state: State[C] = State(original, surgeon.worth.get(name))
        state.given = cast("C | None", surgeon.codes.get(name))
        surgeon.set_attribute(module, self.slot, state)
        surgeon.fold(module, self)

    def state(self, module: nn.Module) -> State[C]:
        """What stands for the parameter."""
        return cast("State[C]", vars(module)[self.slot])

    def fold(self, module: nn.Module) -> None:
        """Round the weight; one that cannot be stays dense."""
        with LOCK:
            state, weight = self.state(module), self._held(module)
            if type(weight) is not nn.Parameter or not self.fits(module, weight):
                return
            state.packed = state.codes = self._codes(module, weight)
            if state.original is None:
                state.shared, state.written = weight, _version(weight)
            else:
                module._parameters[self.key] = placeholder(weight)
                if state.original.value is None:
                    evict(weight)

    def unfold(self, module: nn.Module) -> None:
        """The original back in the table, bit for bit, with what was written into it since."""
        with LOCK:
            state = self.state(module)
            if state.codes is not None and state.original is not None:
                module._parameters[self.key] = self.stock(module)
            state.packed = state.codes = state.shared = None

    def refold(self, module: nn.Module) -> None:
        """What is in the table is the original from now on."""
        self.adopt(module, self._held(module))
        self.fold(module)

    def adopt(self, module: nn.Module, weight: nn.Parameter | None) -> None:
        """``weight`` is the original from now on."""
        state = self.state(module)
        state.packed = state.codes = None
        if state.original is not None and weight is not None and not state.original.lost:
            state.original.hold(weight)

    def stock(self, module: nn.Module, *, home: bool = True) -> nn.Parameter:
        """The original with what was written since; the values in use where it was not kept.

        ``home``: on its own device, even if it waits on another.
        """
        state, weight = self.state(module), self._held(module)
        away = isinstance(weight, Placeholder)
        assert state.original is not None
        if state.original.lost:
            return like(weight, self.dense(module)) if away else weight
        if away:
            return state.original.fetch(home=home)
        return weight if state.codes is None else self._merged(module, weight)

    def lend(self, module: nn.Module) -> nn.Parameter:
        """The rounded weight as a dense parameter, in the table."""
        weight = self._held(module)
        if isinstance(weight, Placeholder):
            with LOCK:
                weight = self._held(module)
                if isinstance(weight, Placeholder):
                    weight = module._parameters[self.key] = like(weight, self.dense(module))
                    self.state(module).packed = None
        return weight

    def ready(self, module: nn.Module) -> C | None:
        """The codes for a product; None while somebody holds the lent weight."""
        state, weight = self.state(module), module._parameters[self.key]
        if state.shared is not None and _version(state.shared) != state.written:
            state.packed = None
        if state.packed is None and state.lent < PATIENCE:
            # Table, local name and argument, and the keeper may have it, too: one more is somebody
            # who may write into it. A shared weight is only read.
            mine = 3 + (state.original is not None and state.original.value is weight)
            if state.original is None or sys.getrefcount(weight) <= mine:
                state.lent += 1
                self.fold(module)
        return None if self.is_another(module) else state.packed

    def is_another(self, module: nn.Module) -> bool:
        """Whether somebody put a weight of his own into the table (``functional_call``)."""
        state, weight = self.state(module), module._parameters[self.key]
        if state.original is None:
            return weight is not state.shared
        return type(weight) is not Placeholder

    def dense(self, module: nn.Module) -> Tensor:
        """The rounded weight as a new stock tensor; the module stays folded."""
        # A weight that came to be in inference mode could never be trained.
        with torch.inference_mode(mode=False):
            return self.opened(module, cast("C", self.state(module).codes))

    def save(self, module: nn.Module, state: dict[str, Tensor], prefix: str) -> None:
        """The original under its stock key."""
        with LOCK:
            if self.slot in vars(module) and self.state(module).original is not None:
                # Written from the host: all originals at once may not fit elsewhere.
                state[prefix + self.key] = self.stock(module, home=False).detach()

    def move(self, module: nn.Module, fn: Any) -> None:
        """``model.to(...)``, for what is not in the table."""
        state = self.state(module)
        if state.original is None:
            state.packed = None
            return
        original = state.original
        twin = original.twin if original.twin is not None else original.value
        if twin is None:
            return
        before = torch.empty(0, dtype=twin.dtype, device=twin.device)
        after = fn(before)
        if (after.dtype, after.device) != (before.dtype, before.device):
            original.put(like(twin, fn(original.fetch().detach())))

    def _held(self, module: nn.Module) -> nn.Parameter:
        return cast(nn.Parameter, module._parameters[self.key])

    def _codes(self, module: nn.Module, weight: nn.Parameter) -> C:
        """The known codes for what is still their weight; else new ones, of the original."""
        state = self.state(module)
        if state.given is not None:
            codes, state.given = state.given, None
            return codes
        if state.codes is not None and state.original is not None:
            if torch.equal(self.dense(module).to(weight.dtype), weight.detach()):
                same = state.codes.dtype is weight.dtype
                return state.codes if same else self.retyped(state.codes, weight.dtype)
            if not state.original.lost:
                weight = self._merged(module, weight)
        return self.round(module, weight.detach(), state.worth)

    def _merged(self, module: nn.Module, weight: nn.Parameter) -> nn.Parameter:
        if weight.is_meta:
            return weight
        original = self.state(module).original
        assert original is not None
        return original.merge(weight, self.dense(module).to(weight.device, weight.dtype))

    def __deepcopy__(self, memo: dict[int, Any]) -> Rounding[C]:
        return self


class Rounds(Canonical):
    """A module some of whose parameters are codes: loading, moving and assigning reach them."""

    bridges: tuple[Rounding[Any], ...]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As ``nn.Module``; a new weight is a new original."""
        ours = (b for b in self.bridges if b.key == name and b.slot in vars(self))
        bridge = next(ours, None)
        if bridge is not None and param is not None:
            module = cast(nn.Module, self)
            if bridge.state(module).shared is param:
                return
            bridge.adopt(module, param)
        super().register_parameter(name, param)  # type: ignore[misc]

    def _load_from_state_dict(self, *args: Any) -> None:
        module = cast(nn.Module, self)
        for bridge in self.bridges:
            bridge.unfold(module)
        try:
            super(Canonical, self)._load_from_state_dict(*args)  # type: ignore[misc]
        finally:
            for bridge in self.bridges:
                bridge.refold(module)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        module = cast(nn.Module, self)
        for bridge in self.bridges:
            bridge.lend(module)
        super()._apply(*args, **kwargs)  # type: ignore[misc]
        for bridge in self.bridges:
            bridge.move(module, args[0])
        return self
