"""Attention over a part of the keys: windows around a query, blocks, and tokens that all see.

Each part is one call of the fused kernel on views of keys and values, so neither scores nor copies
of keys are written. Parts that share a softmax are joined by their log-sum-exps.

Source: Longformer, arXiv 2004.05150, and BigBird, arXiv 2007.14062, for the patterns;
FlashAttention, arXiv 2205.14135, for how parts of a softmax are joined.
"""

from __future__ import annotations

from math import gcd, log
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# So many queries a call share their window: more of them look at more keys that are not theirs,
# and fewer are too few for the kernel.
ROWS, FEWEST = 64, 16
# What BigBird adds where a key is masked.
PENALTY = -10000.0


class Part(NamedTuple):
    """``softmax(scores) @ value``, ``[batch, length, heads, dim]``, over some of the keys; and the
    log-sum-exp ``[batch, length, heads]`` of their scores."""

    out: Tensor
    lse: Tensor


def attended(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Part:
    """``[batch, length, heads, dim]`` in and out, scaled by the root of the last axis; ``bias`` is
    added to the scores and broadcasts to ``[batch, heads, length, keys]``. On CPUs, without
    gradients."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(t.transpose(1, 2) for t in (query, key, value)), attn_mask=bias
    )
    return Part(out.transpose(1, 2), lse.transpose(1, 2))


def joined(one: Part, other: Part) -> Tensor:
    """The output of one softmax over the keys of both, which must not overlap."""
    share = torch.sigmoid(one.lse - other.lse).unsqueeze(-1)
    return torch.lerp(other.out, one.out, share.to(one.out.dtype))


def bias_dtype(query: Tensor) -> torch.dtype:
    """What the kernel takes beside ``query`` and loses no digits of."""
    return torch.promote_types(torch.float32, query.dtype)


def biases(query: Tensor, masked: Tensor, low: float) -> Tensor:
    """``low`` where ``masked``, else 0."""
    nothing = torch.zeros(masked.shape, dtype=bias_dtype(query), device=masked.device)
    return nothing.masked_fill(masked, low)


def sliding(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, reach: int) -> Part:
    """Every query over the keys at most ``reach`` away. ``bias [batch, length]`` is added by keys;
    the length is a multiple of ``reach``."""
    length = query.shape[1]
    rows = gcd(length, ROWS)
    rows = rows if rows >= FEWEST else reach
    around = (0, 0, 0, 0, reach, reach)
    keys, values = pad(key, around), pad(value, around)
    places = torch.arange(rows + 2 * reach, device=query.device)
    steps = places - torch.arange(rows, device=query.device)[:, None]
    band = biases(query, (steps < 0) | (steps > 2 * reach), -torch.inf)
    around_rows = pad(bias, (reach, reach), value=-torch.inf).unfold(1, len(places), rows)
    parts = [
        _in_windows(*one[:3], one[3][:, None, None] + band)
        for one in zip(query, keys, values, around_rows, strict=True)
    ]
    return Part(*(torch.stack(found) for found in zip(*parts, strict=True)))


def _in_windows(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Part:
    """One sequence, ``[length, heads, dim]``, cut into as many blocks as ``bias``, ``[blocks, 1,
    queries, keys]``, has, each with its window of the keys."""
    blocks, span = bias.shape[0], bias.shape[-1]
    step = query.shape[0] // blocks
    cut = query.unflatten(0, (blocks, step))
    windows = (t.unfold(0, span, step).permute(0, 3, 1, 2) for t in (keys, values))
    out, lse = attended(cut, *windows, bias)
    return Part(out.flatten(0, 1), lse.flatten(0, 1))


def blocked(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, size: int) -> Part:
    """Every query over the keys of its own block of ``size``; ``bias [batch, length]`` by keys."""
    batch, blocks = query.shape[0], query.shape[1] // size
    cut = (t.reshape(batch * blocks, size, *t.shape[2:]) for t in (query, key, value))
    out, lse = attended(*cut, bias.reshape(batch * blocks, 1, 1, size))
    return Part(out.reshape(query.shape), lse.reshape(query.shape[:-1]))


def block_sparse(
    query: Tensor, key: Tensor, value: Tensor, masked: Tensor, size: int, again: int
) -> Tensor:
    """BigBird's pattern, over five blocks of ``size`` or more; ``masked [batch, length]`` by keys.

    The first and the last block look at all keys, and are seen by all; the others also look at
    three blocks around them, and ``again`` times more at the first: what is random while training
    are blocks of number zero afterwards. So often counted keys have the logarithm in their bias.
    """
    bias = biases(query, masked, PENALTY)
    ends = torch.cat([query[:, :size], query[:, -size:]], 1)
    outer = attended(ends, key, value, bias[:, None, None]).out
    inner = query[:, size:-size]
    # What is in a window and global is counted with the global keys.
    around = bias.unfold(1, 3 * size, size).clone()
    around[:, 0, :size] = around[:, -1, -size:] = -torch.inf
    parts = [
        _in_windows(*one[:3], one[3][:, None, None])
        for one in zip(inner, key, value, around, strict=True)
    ]
    near = Part(*(torch.stack(found) for found in zip(*parts, strict=True)))
    keys, values = (torch.cat([t[:, :size], t[:, -size:]], 1) for t in (key, value))
    counted = torch.cat([bias[:, :size] + log(1 + again), bias[:, -size:]], 1)
    out = joined(near, attended(inner, keys, values, counted[:, None, None]))
    return torch.cat([outer[:, :size], out, outer[:, size:]], 1)
