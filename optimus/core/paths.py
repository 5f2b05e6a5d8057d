"""Reading a model: its sites, its ties, and what is wrapped around it. Nothing here changes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Site:
    """One module in one model: its path, itself, and the module that owns it (None at the root)."""

    path: str
    module: nn.Module
    owner: nn.Module | None = None


def sites(model: nn.Module) -> Iterator[Site]:
    """Every module once, parents first, the root under the path ``""``."""
    for path, module in model.named_modules():
        owner = model.get_submodule(path.rpartition(".")[0]) if path else None
        yield Site(path, module, owner)


def paths_of(model: nn.Module) -> dict[nn.Module, str]:
    """The path of every module, for looking a module up by identity."""
    return {module: path for path, module in model.named_modules()}


def ties(model: nn.Module) -> tuple[frozenset[str], ...]:
    """Groups of two or more parameter names that are one object."""
    groups: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(name)
    return tuple(frozenset(names) for names in groups.values() if len(names) > 1)


def is_sharded(module: nn.Module) -> bool:
    """Whether the parameters of the module, or below it, are parts on several processes: of FSDP,
    which keeps books on them, or of tensor parallelism. By name, to import nothing for it."""
    names = {c.__name__ for c in type(module).__mro__}
    return not names.isdisjoint({"FSDPModule", "FullyShardedDataParallel"}) or any(
        is_part(parameter) for parameter in module._parameters.values()
    )


def is_part(tensor: Tensor | None) -> bool:
    """Whether several processes hold it together, each its own part (``DTensor``)."""
    return type(tensor).__name__ == "DTensor"


def generates(model: nn.Module) -> bool:
    """Whether transformers' ``generate`` works on the model."""
    can_generate = getattr(model, "can_generate", None)
    return bool(can_generate()) if callable(can_generate) else False


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile(model)`` or ``DistributedDataParallel``; else itself."""
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return unwrap(model.module)
    return model
