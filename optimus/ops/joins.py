"""Scores put together from several products: sums of them, and blocks side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from optimus.ops.scores import Scores


def summed(one: Scores, other: Scores) -> Scores | None:
    """The sum of two products is one product of operands side by side (LiLT: text and layout)."""
    if not _are_alike([one, other]) or one.left.ndim < 4:
        return None
    left = torch.cat([one.left * one.scale, other.left * other.scale], dim=-1)
    new = Scores(left, torch.cat([one.right, other.right], dim=-2), (), one.shortest)
    bias = [s.bias for s in (one, other) if s.bias is not None]
    new.bias = sum(bias[1:], bias[0]) if bias else None
    return new


def concatenated(func: Any, parts: Sequence[Any], dim: int) -> Scores | None:
    """Blocks of keys with queries of their own, and blocks of queries (LUKE: words and entities).

    ``[a @ k, b @ l]`` is ``[a, b] @ [[k, 0], [0, l]]``; queries one below the other need one set of
    keys.
    """
    scores = [one for one in parts if isinstance(one, Scores)]
    if (
        len(scores) != len(parts)
        or not _are_alike(scores)
        or any(s.bias is not None for s in scores)
    ):
        return None
    axis = dim - scores[0].ndim if dim >= 0 else dim
    new = {-1: _of_keys, -2: _of_queries}.get(axis, lambda _: None)(scores)
    if new is not None:
        new.steps = ((func, ([one.copied() for one in scores], dim), {}),)
    return new


def _are_alike(scores: list[Scores]) -> bool:
    """Whether nothing but a scale and a bias came to them, and they are seen in one shape."""
    head = scores[0]
    return all(
        one.factor is one.gate is one.real is None
        and not one.normal
        and not one.peaked
        and (one.lead, one.fine) == (head.lead, head.fine)
        for one in scores
    )


def _of_keys(scores: list[Scores]) -> Scores | None:
    if any(one.q != scores[0].q for one in scores):
        return None
    left = torch.cat([one.left * one.scale for one in scores], dim=-1)
    rights = [one.right for one in scores]
    new = Scores(left, _diagonal(rights), (), scores[0].shortest)
    new.blocks = tuple(rights)
    return new


def _diagonal(blocks: list[Tensor]) -> Tensor:
    """The blocks along the diagonal of the last two axes, zeros elsewhere."""
    rows = []
    for place, block in enumerate(blocks):
        row = [
            block if i == place else block.new_zeros(*block.shape[:-1], other.shape[-1])
            for i, other in enumerate(blocks)
        ]
        rows.append(torch.cat(row, dim=-1))
    return torch.cat(rows, dim=-2)


def _of_queries(scores: list[Scores]) -> Scores | None:
    head = scores[0]
    if torch.compiler.is_compiling() or not all(_have_one_right(head, one) for one in scores):
        return None
    left = torch.cat([one.left * one.scale for one in scores], dim=-2)
    return Scores(left, head.right, (), head.shortest)


def _have_one_right(one: Scores, other: Scores) -> bool:
    pairs = zip(one.blocks or (one.right,), other.blocks or (other.right,), strict=False)
    return len(one.blocks) == len(other.blocks) and all(
        (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride()) for a, b in pairs
    )
