"""Packed tokens within a captured graph, whose number only the run will know.

What ``varlen`` does by a kernel call a sequence, a graph cannot: it has no loops. Here attention
alone is padded again, by gathers, and all that is by token is computed of the real ones.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class PackedGraph:
    """Where the tokens of a padded batch are that are computed: ``mask [batch, length]`` has them,
    and so are those at position 0, padding or not, since poolers and heads read there.

    ``states`` is None: nothing is kept for a cache.
    """

    states = None

    def __init__(self, mask: Tensor) -> None:
        self.batch, self.length = mask.shape
        self.real = mask.bool()
        first = torch.arange(self.length, device=mask.device) == 0
        self.kept = self.real | first
        flat = self.kept.reshape(-1)
        # [total]: places in the flattened batch; [batch * length]: and back, some of them anywhere.
        self.index = flat.nonzero().squeeze(1)
        torch._check(self.index.shape[0] >= 1)
        self.back = torch.where(flat, flat.long().cumsum(0) - 1, 0)

    def pack(self, padded: Tensor) -> Tensor:
        """``[batch or 1, length, ...]`` to ``[1, total, ...]``."""
        rows = padded.expand(self.batch, *padded.shape[1:]).reshape(-1, *padded.shape[2:])
        return rows.index_select(0, self.index).unsqueeze(0)

    def unpack(self, packed: Tensor) -> Tensor:
        """``[1, total, features]`` to ``[batch, length, features]``, zero where nothing is kept."""
        rows = packed[0].index_select(0, self.back).view(self.batch, self.length, -1)
        return rows * self.kept.unsqueeze(-1).to(rows.dtype)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """``[1, heads, total, dim]`` in, ``[1, total, heads, dim]`` out; no row sees another."""
        out = scaled_dot_product_attention(
            *(self._padded(part) for part in (query, key, value)),
            attn_mask=self.real[:, None, None, :],
            scale=scale,
        )
        rows = out.transpose(1, 2).reshape(self.batch * self.length, *query.shape[1::2])
        return rows.index_select(0, self.index).unsqueeze(0)

    def _padded(self, part: Tensor) -> Tensor:
        heads, dim = part.shape[1], part.shape[3]
        rows = part[0].index_select(1, self.back)
        return rows.view(heads, self.batch, self.length, dim).transpose(0, 1)
