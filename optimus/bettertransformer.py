"""A drop-in for ``optimum.bettertransformer``: change the import, keep the calls.

Unlike its ancestor it runs whatever optimus registers, checks the answers, saves while transformed
and reverses in place.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from optimus.core.engine import reverse, transform


class BetterTransformer:
    """The two verbs of optimum's class, under their old signatures."""

    @staticmethod
    def transform(
        model: nn.Module,
        keep_original_model: bool = False,  # noqa: FBT002  the old signature
        max_memory: dict[int | str, int | str] | None = None,
        offload_dir: str | None = None,
        **kwargs: Any,
    ) -> nn.Module:
        """``optimus.transform``; with ``keep_original_model``, of a copy that shares its storage.

        The copy's tensors are copied when one side writes to them, and not before. ``max_memory``
        and ``offload_dir`` were needed to dispatch a rebuilt model again; here hooks and device
        map stay where they are, and a value is answered with a warning. Other keywords go to
        ``optimus.transform``.
        """
        if max_memory is not None or offload_dir is not None:
            warnings.warn(
                "max_memory and offload_dir have no effect: the transform leaves hooks and device "
                "map in place, so there is nothing to dispatch again.",
                stacklevel=2,
            )
        return transform(_shared_copy(model) if keep_original_model else model, **kwargs)

    @staticmethod
    def reverse(bt_model: nn.Module) -> nn.Module:
        """``optimus.reverse``."""
        return reverse(bt_model)


def _shared_copy(model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = _lazily(tensor)
    return copy.deepcopy(model, memo)


def _lazily(tensor: Tensor) -> Tensor:
    """A copy on write; parameters keep their class, flags and attributes."""
    value = _lazy_clone(tensor)
    if not isinstance(tensor, nn.Parameter):
        return value
    twin = nn.Parameter(value, requires_grad=tensor.requires_grad)
    vars(twin).update(vars(tensor))
    return twin


def _lazy_clone(tensor: Tensor) -> Tensor:
    try:
        return torch._lazy_clone(tensor.detach())
    except RuntimeError:
        # A checkpoint reader's allocation cannot be shared on write. If this tensor is all there is
        # of it, the same bytes in torch's own allocation can; a view of more is copied.
        if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
            return tensor.detach().clone()
        tensor.data = tensor.detach().clone()
        return torch._lazy_clone(tensor.detach())
