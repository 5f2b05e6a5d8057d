"""Attention with a soft cap on its scores, by tiles that stay in the cache.

SDPA has no argument for a cap. Flex attention has, and its first call compiles for 16 s on a CPU;
a tile of query rows, on which every step works in place, needs no compiler and never writes the
scores of a whole layer (Xeon, 512 tokens, batch 4, 12 heads of 64, one thread: 230 ms against
764 for the model's own way).

Chunks with a context, as audio encoders have them, are tiles already: so many of them are taken
at a time as fit.

Source: Gemma 2, arXiv 2408.00118, for the cap; FlashAttention, arXiv 2205.14135, for the tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

# How many scores a tile holds: 4 MB of fp32, which a core's share of the last cache takes.
TILE = 1 << 20


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, cap: float
) -> Tensor | None:
    """``softmax(cap * tanh(q kᵀ * scale / cap) + mask) @ v``, by the models' own steps in order.

    ``[batch, heads, length, dim]`` in and out; keys and values may have fewer heads. ``mask``, of
    floats, broadcasts to ``[batch, heads, length, keys]``. None where there may be a backward pass,
    off the CPU, and while compiling, where a compiler fuses the steps itself.
    """
    learning = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if learning or torch.compiler.is_compiling() or query.device.type != "cpu":
        return None
    groups = query.shape[1] // key.shape[1]
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    for one, row in enumerate(query):
        keys, values = (t[one].repeat_interleave(groups, 0) for t in (key, value))
        bias = None if mask is None else mask[one if mask.shape[0] > 1 else 0]
        _attend(row, keys.transpose(1, 2), values, bias, (scale, cap), out[one])
    return out


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    numbers: tuple[float, float],
    out: Tensor,
) -> None:
    """One sequence, ``[heads, length, dim]``, into ``out``."""
    scale, cap = numbers
    rows = max(1, TILE // (keys.shape[0] * keys.shape[-1]))
    for start in range(0, query.shape[1], rows):
        tile = slice(start, start + rows)
        scores = torch.matmul(query[:, tile], keys).mul_(scale).div_(cap).tanh_().mul_(cap)
        if mask is not None:
            scores += mask[:, tile] if mask.shape[-2] > 1 else mask
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
        out[:, tile] = torch.matmul(weights, values)


def capped_windows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    masked: Tensor | None,
    fill: float,
    cap: float,
) -> Tensor:
    """``softmax(cap * tanh((q kᵀ + shifted(q positions)) / cap)) @ v``, by the models' own steps.

    ``[batch, heads, chunks, length, dim]``, keys and values with a length of their own, and
    ``positions [heads, dim, distances]``: the score of query i and key j has the distance j - i
    added, where there is one. ``masked``, which broadcasts to ``[batch, heads, chunks, length,
    keys]``, is filled with ``fill``. Out comes ``[batch, chunks, length, heads, dim]``.
    """
    batch, heads, chunks, rows = query.shape[:4]
    step = max(1, TILE // (heads * rows * key.shape[3]))
    out = value.new_empty(batch, chunks, rows, heads, value.shape[-1])
    for one in range(batch):
        mask = None if masked is None else masked[one if len(masked) > 1 else 0]
        for start in range(0, chunks, step):
            tile = slice(start, start + step)
            q, k, v = (t[one, :, tile] for t in (query, key, value))
            scores = torch.matmul(q, k.transpose(-1, -2)).add_(_shifted(q, positions, k.shape[2]))
            scores.div_(cap).tanh_().mul_(cap)
            if mask is not None:
                scores.masked_fill_(mask[:, tile], fill)
            weights = torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype)
            out[one, tile] = torch.matmul(weights, v).permute(1, 2, 0, 3)
    return out


def _shifted(query: Tensor, positions: Tensor, keys: int) -> Tensor:
    """Scores by distance put under their keys: rows that are one too long, read one after another,
    move by one each (Transformer-XL, arXiv 1901.02860, appendix B)."""
    heads, chunks, rows = query.shape[:3]
    distances = positions.shape[-1]
    wide = query.new_zeros(heads, chunks, rows, keys + 1)
    found = torch.matmul(query.flatten(1, 2), positions)
    wide[..., :distances] = found.unflatten(1, (chunks, rows))
    return wide.flatten(2)[..., : rows * keys].unflatten(2, (rows, keys))
