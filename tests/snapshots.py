"""Everything about a model that ``reverse`` must give back, and how far two answers are apart."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

TABLES = ("_parameters", "_buffers", "_modules")


class Bits:
    """The bytes of a tensor, to be compared with those of another."""

    def __init__(self, tensor: Tensor) -> None:
        tensor = torch.empty(0) if tensor.is_meta else tensor
        self.raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bits) and torch.equal(self.raw, other.raw)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{len(self.raw)} bytes, CRC {zlib.crc32(self.raw.numpy()):08x}"


def snapshot(model: nn.Module, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Classes, tables and their order, flags, hooks, configs and the bytes of every tensor."""
    return {path: _of_module(m, without) for path, m in model.named_modules()}


def _of_module(module: nn.Module, without: tuple[str, ...]) -> dict[str, Any]:
    instance = {key: value for key, value in vars(module).items() if key not in without}
    config = instance.get("config")
    return {
        "class": type(module),
        "identity": id(module),
        "attributes": list(instance),
        "plain": {k: v for k, v in instance.items() if isinstance(v, int | float | str)},
        "tables": {name: list(instance[name]) for name in TABLES},
        "not persistent": set(module._non_persistent_buffers_set),
        "hooks": {k: dict(v) for k, v in instance.items() if k.endswith("_hooks")},
        "config": (id(config), copy.deepcopy(vars(config)) if config is not None else None),
        "tensors": {
            key: _of_tensor(tensor)
            for name in TABLES[:2]
            for key, tensor in instance[name].items()
            if tensor is not None
        },
    }


def _of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    layout = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
    return type(tensor), *layout, tensor.requires_grad, sorted(vars(tensor)), Bits(tensor)


def values(state: Mapping[str, Tensor]) -> list[tuple[Any, ...]]:
    """A state dict as comparable data, in its order."""
    return [(key, t.dtype, tuple(t.shape), Bits(t)) for key, t in state.items()]


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output, named; caches are passed over."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{name}.{key}")
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from tensors(item, f"{name}.{index}")


def distance(mine: Any, stock: Any, mask: Tensor | None) -> float:
    """The largest relative error of any tensor, where its answer is defined; inf where they differ
    in kind, names or shapes."""
    if isinstance(stock, type) or isinstance(mine, type):
        return 0.0 if mine is stock else float("inf")
    ours, theirs = dict(tensors(mine)), dict(tensors(stock))
    if type(mine) is not type(stock) or list(ours) != list(theirs):
        return float("inf")
    return max((_apart(ours[k], v, mask) for k, v in theirs.items()), default=0.0)


def _apart(mine: Tensor, stock: Tensor, mask: Tensor | None) -> float:
    if mine.shape != stock.shape:
        return float("inf")
    a, b = (defined(t.detach(), mask).double() for t in (mine, stock))
    finite = torch.isfinite(b)
    if not torch.equal(finite, torch.isfinite(a)):
        return float("inf")
    a, b = a[finite], b[finite]
    return float((a - b).norm() / b.norm()) if not torch.equal(a, b) else 0.0


def defined(value: Tensor, mask: Tensor | None) -> Tensor:
    """The real positions of hidden states, and of ``[batch, heads, length, width]``."""
    if mask is None or value.ndim < 2:
        return value
    if value.shape[:2] == mask.shape:
        return value[mask.bool()]
    if value.ndim == 4 and value.shape[::2] == mask.shape:
        return value.transpose(1, 2)[mask.bool()]
    return value


def identical(mine: Any, stock: Any) -> bool:
    """Whether two answers are the same bits under the same names."""
    if isinstance(stock, type):
        return mine is stock
    ours, theirs = list(tensors(mine)), list(tensors(stock))
    return [(k, Bits(t)) for k, t in ours] == [(k, Bits(t)) for k, t in theirs]
