"""Memory for keys and values that calls of ``generate`` hand on to each other."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor


class Pool:
    """Flat tensors that nobody is using. Several threads may take and give at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Tensor] = []

    def take(self, count: int, like: Tensor) -> Tensor:
        """At least ``count`` numbers of the dtype and device of ``like``, of any value."""
        with self._lock:
            fitting = [
                one
                for one in self._free
                if one.numel() >= count and one.dtype is like.dtype and one.device == like.device
            ]
            if fitting:
                found = min(fitting, key=Tensor.numel)
                self._free = [one for one in self._free if one is not found]
                return found
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(mode=False):
            return torch.empty(count, dtype=like.dtype, device=like.device)

    def give(self, flat: Tensor) -> None:
        """Back for others, if nobody reads it any more."""
        storage = flat.untyped_storage()
        if torch._C._storage_Use_Count(storage._cdata) <= OWN:
            with self._lock:
                self._free.append(flat)

    def __len__(self) -> int:
        return len(self._free)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pool:
        return Pool()

    def __reduce__(self) -> tuple[Any, ...]:
        return Pool, ()


# The tensor itself, and the storage object that is asked.
OWN = 2
