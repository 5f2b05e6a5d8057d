"""Batch axes of attention scores: the shapes they are seen in, and the two that a kernel takes.

Models look at one set of scores as ``[batch * heads, q, k]``, then as ``[batch, heads, q, k]``,
then with windows split from the batch. ``refined`` finds the axes that all these views share.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from operator import mul

from torch import Tensor

Axes = tuple[int, ...]


def broadcast(one: Sequence[int], other: Sequence[int]) -> Axes:
    """The axes of a product of two batches of as many axes; torch's own is 30 times slower."""
    return tuple([a if b == 1 else b for a, b in zip(one, other, strict=True)])


def refined(fine: Axes, other: Axes) -> Axes | None:
    """The coarsest axes that both views of one tensor are made of, or None."""
    marks = sorted({1, *accumulate(fine, mul), *accumulate(other, mul)})
    steps = list(pairwise(marks))
    if prod(fine) != prod(other) or marks[0] < 1 or any(b % a for a, b in steps):
        return None
    return tuple(b // a for a, b in steps)


def without_ones(lead: Axes) -> Axes:
    """The axes that have more than one element, which is what fine axes are."""
    return tuple(size for size in lead if size != 1)


def split(lead: Axes, fine: Axes) -> list[Axes] | None:
    """For each axis of ``lead``, the fine axes it consists of. Axes of one element have none."""
    rest, groups = list(fine), []
    for size in lead:
        group: list[int] = []
        while prod(group) < size and rest:
            group.append(rest.pop(0))
        if prod(group) != size:
            return None
        groups.append(tuple(group))
    return groups


def spread(shape: Sequence[int], lead: Axes, fine: Axes) -> Axes | None:
    """``shape``, which broadcasts against ``lead``, along the fine axes."""
    groups = split(lead, fine)
    if groups is None or len(shape) > len(lead):
        return None
    full = (1,) * (len(lead) - len(shape)) + tuple(shape)
    found: list[int] = []
    for size, whole, group in zip(full, lead, groups, strict=True):
        if size not in (1, whole):
            return None
        found.extend(group if size == whole else (1,) * len(group))
    return tuple(found)


def halves(fine: Axes, shape: Axes) -> tuple[int, Axes]:
    """Where to cut ``fine`` into batch and heads so that ``shape`` merges without being expanded.

    Returns the cut, and ``shape`` expanded as far as it has to be where no cut serves.
    """
    for cut in range(len(fine) - 1, -1, -1):
        if all(_merges(fine[part], shape[part]) for part in (slice(cut), slice(cut, None))):
            return cut, shape
    cut = max(len(fine) - 1, 0)
    parts = (
        shape[part] if _merges(fine[part], shape[part]) else fine[part]
        for part in (slice(cut), slice(cut, None))
    )
    return cut, sum(parts, ())


def _merges(fine: Axes, shape: Axes) -> bool:
    wide = [have == 1 for size, have in zip(fine, shape, strict=True) if size > 1]
    return all(wide) or not any(wide)


def unexpanded(tensor: Tensor) -> Tensor:
    """One of what was expanded along an axis before the last: the rest are the same numbers.

    XLM spreads its mask of keys over all heads and queries before it fills with it.
    """
    for axis in range(tensor.ndim - 1):
        if tensor.stride(axis) == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor
