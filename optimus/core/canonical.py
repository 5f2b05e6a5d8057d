"""How a changed layout looks in a checkpoint: under the stock keys, with the stock values.

A bridge is a layout with one more verb, ``save``. ``Canonical`` sends ``state_dict`` and loading
through the bridges of a module. It overrides methods of the class and registers no hook, so that
there is nothing to remove, to copy or to leak.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from optimus.core.errors import SurgeryError


class Bridge(Protocol):
    """Between a module's own storage and the checkpoint that everyone else reads."""

    def fold(self, module: nn.Module) -> None:
        """From the stock layout to this one. Interrupted, it leaves what ``unfold`` can undo."""

    def unfold(self, module: nn.Module) -> None:
        """Back to the stock layout, bit for bit; nothing to do on a module that is not folded."""

    def save(self, module: nn.Module, state: dict[str, Tensor], prefix: str) -> None:
        """Write the stock values under the stock keys; the module stays folded."""

    def lend(self, module: nn.Module) -> nn.Parameter:
        """The values in the stock layout, in the table, until the module folds them again."""


class Canonical:
    """``state_dict()`` and loading pass through ``bridges``; keys never change."""

    bridges: tuple[Bridge, ...] = ()

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """As ``nn.Module.state_dict``, in the stock layout."""
        # torch still takes destination and prefix by position, with a warning.
        prefix = prefix or (args[1] if len(args) > 1 else "")
        state = super().state_dict(*args[:1], prefix=prefix, **kwargs)  # type: ignore[misc]
        for bridge in self.bridges:
            bridge.save(self, state, prefix)  # type: ignore[arg-type]
        return state

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module.named_parameters``, with the values themselves.

        Who asks the module itself, and not the model, means to do something with its own
        parameters: FSDP and tensor parallelism cut them up.
        """
        for bridge in self.bridges:
            bridge.lend(self)  # type: ignore[arg-type]
        return super().named_parameters(*args, **kwargs)  # type: ignore[misc]

    def _load_from_state_dict(self, *args: Any) -> None:
        for bridge in self.bridges:
            bridge.unfold(self)  # type: ignore[arg-type]
        try:
            super()._load_from_state_dict(*args)  # type: ignore[misc]
        finally:
            for bridge in self.bridges:
                bridge.fold(self)  # type: ignore[arg-type]


class Placeholder(nn.Parameter):
    """A parameter of the right shape, dtype, device and flags that holds one NaN.

    It stands in the parameter table while the values live elsewhere, so that ``model.dtype``,
    ``model.device`` and parameter counts stay right, and so that whoever computes with it by
    mistake gets NaN and not a plausible number.
    """

    @property
    def data(self) -> Tensor:
        """NaN, as everything that is read here."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise SurgeryError(
            "this parameter stands for a weight that is kept in another layout, and a value given "
            "to it would be lost. Set module.weight or use load_state_dict, or reverse first."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        twin: Placeholder = memo.setdefault(id(self), placeholder(self))
        return twin


def placeholder(parameter: nn.Parameter) -> Placeholder:
    """What stands for ``parameter`` while it is away; costs one element."""
    value = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
    twin = Placeholder(value.expand(parameter.shape), requires_grad=parameter.requires_grad)
    vars(twin).update(vars(parameter))
    return twin


def like(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    """``value`` as a parameter with the flags and attributes of ``parameter``."""
    twin = nn.Parameter(value, requires_grad=parameter.requires_grad)
    vars(twin).update(vars(parameter))
    return twin
