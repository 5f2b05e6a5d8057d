"""A decoder in the manner of Meta's reference Llama, written from the published formulas.

Rotation by complex numbers (RoFormer, arXiv:2104.09864), RMS norm (arXiv:1910.07467), SwiGLU
(arXiv:2002.05202), grouped keys (arXiv:2305.13245), and a cache that is written in place. Nobody
has a replacement for its classes: what is done to it is done to its graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    """Of a model that a test builds in no time. ``table``: how its angles are kept."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    groups: int = 2
    words: int = 99
    longest: int = 48
    batch: int = 4
    table: str = "attribute"


def angles(sizes: Sizes) -> Tensor:
    """``[longest, head / 2]`` in radians: position times base to the power of minus 2i/d."""
    head = sizes.width // sizes.heads
    speeds = 10000.0 ** (-torch.arange(0, head, 2) / head)
    return torch.outer(torch.arange(sizes.longest), speeds)


def turned(states: Tensor, table: Tensor) -> Tensor:
    """``[batch, length, heads, head]``, each pair of features rotated by its place's angle."""
    pairs = torch.view_as_complex(states.float().reshape(*states.shape[:-1], -1, 2))
    shape = [size if axis in (1, pairs.ndim - 1) else 1 for axis, size in enumerate(pairs.shape)]
    return torch.view_as_real(pairs * table.view(*shape)).flatten(3).type_as(states)


class Norm(nn.Module):
    """Divided by the root of the mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, states: Tensor) -> Tensor:
        """``[..., width]``."""
        return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    """Keys and values of ``groups``, kept for as many rows and places as there can be."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.width // sizes.heads
        narrow = sizes.groups * self.head
        self.wq = nn.Linear(sizes.width, sizes.width, bias=False)
        self.wk = nn.Linear(sizes.width, narrow, bias=False)
        self.wv = nn.Linear(sizes.width, narrow, bias=False)
        self.wo = nn.Linear(sizes.width, sizes.width, bias=False)
        shape = (sizes.batch, sizes.longest, sizes.groups, self.head)
        self.register_buffer("keys", torch.zeros(shape), persistent=False)
        self.register_buffer("values", torch.zeros(shape), persistent=False)

    def forward(self, states: Tensor, start: int, table: Tensor, mask: Tensor | None) -> Tensor:
        """``[batch, length, width]``; ``mask [length, start + length]`` is added to scores."""
        batch, length, width = states.shape
        q, k, v = (
            f(states).view(batch, length, -1, self.head) for f in (self.wq, self.wk, self.wv)
        )
        q, k = turned(q, table), turned(k, table)
        self.keys[:batch, start : start + length] = k
        self.values[:batch, start : start + length] = v
        seen = [t[:batch, : start + length].transpose(1, 2) for t in (self.keys, self.values)]
        out = F.scaled_dot_product_attention(q.transpose(1, 2), *seen, mask, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and SwiGLU, each beside a residual."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.norm = Attention(sizes), Norm(sizes.width)
        self.w1 = nn.Linear(sizes.width, 2 * sizes.width, bias=False)
        self.w2 = nn.Linear(2 * sizes.width, sizes.width, bias=False)
        self.w3 = nn.Linear(sizes.width, 2 * sizes.width, bias=False)
        self.ffn_norm = Norm(sizes.width)

    def forward(self, states: Tensor, start: int, table: Tensor, mask: Tensor | None) -> Tensor:
        """As ``Attention``."""
        states = states + self.attention(self.norm(states), start, table, mask)
        inner = self.ffn_norm(states)
        return states + self.w2(F.silu(self.w1(inner)) * self.w3(inner))


class ReferenceLlama(nn.Module):
    """Logits of ids ``[batch, length]`` that follow ``start`` others.

    The table is a plain attribute, as Meta's is, a ``buffer`` of the checkpoint, or made ``inside``
    the forward of angles.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(sizes.words, sizes.width)
        self.layers = nn.ModuleList([Block(sizes) for _ in range(sizes.layers)])
        self.norm, self.output = Norm(sizes.width), nn.Linear(sizes.width, sizes.words, bias=False)
        turns = angles(sizes)
        table = torch.polar(torch.ones_like(turns), turns)
        if sizes.table == "buffer":
            self.register_buffer("freqs_cis", table)
        elif sizes.table == "inside":
            self.register_buffer("turns", turns, persistent=False)
        else:
            self.freqs_cis = table

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        """``[batch, length, words]``."""
        length = ids.shape[1]
        states = self.embeddings(ids)
        if hasattr(self, "turns"):
            table = torch.polar(torch.ones_like(self.turns), self.turns)
        else:
            table = self.freqs_cis.to(states.device)
        mask = torch.full((length, length), float("-inf")).triu(1) if length > 1 else None
        if mask is not None:
            mask = torch.hstack([torch.zeros(length, start), mask])
        for layer in self.layers:
            states = layer(states, start, table[start : start + length], mask)
        return self.output(self.norm(states)).float()


def reference_llama(**choices: object) -> ReferenceLlama:
    """A seeded one."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ReferenceLlama(Sizes(**choices)).eval()  # type: ignore[arg-type]
    # Its cache is written in place and would learn.
    return model.requires_grad_(False)
