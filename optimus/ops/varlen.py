"""Attention over the real tokens of a ragged batch, laid end to end."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Ragged:
    """Where the real tokens of a padded batch ``[batch, length]`` are.

    ``index [total]``: their places in the flattened batch. ``lengths``: how many each row has;
    rows without any do not appear. Padding may be anywhere in a row.
    """

    def __init__(self, mask: Tensor) -> None:
        self.batch, self.length = mask.shape
        self.index = mask.reshape(-1).nonzero().squeeze(1)
        self.lengths = [n for n in mask.sum(1).tolist() if n]
        self._bands: dict[tuple[int, int], Tensor] = {}

    def pack(self, padded: Tensor) -> Tensor:
        """``[batch or 1, length, ...]`` to ``[1, total, ...]``."""
        rows = padded.expand(self.batch, *padded.shape[1:]).reshape(-1, *padded.shape[2:])
        return rows.index_select(0, self.index).unsqueeze(0)

    def unpack(self, packed: Tensor) -> Tensor:
        """``[1, total, ...]`` to ``[batch, length, ...]``, zero where there is no token."""
        rows = packed.new_zeros(self.batch * self.length, *packed.shape[2:])
        rows = rows.index_copy(0, self.index, packed[0])
        return rows.view(self.batch, self.length, *packed.shape[2:])

    def band(self, length: int, window: int, device: torch.device) -> Tensor | None:
        """True where two tokens are at most ``window`` apart; None where all are."""
        if length <= window + 1:
            return None
        if (length, window) not in self._bands:
            at = torch.arange(length, device=device)
            self._bands[length, window] = (at[:, None] - at).abs() <= window
        return self._bands[length, window]


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ragged: Ragged,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Bidirectional attention within each sequence: ``[1, heads, total, dim]`` in,
    ``[1, total, heads, dim]`` out.

    One kernel call a sequence, so that no sequence can see another and no mask is needed.
    """
    outputs, start = [], 0
    for length in ragged.lengths:
        part = slice(start, start + length)
        band = None if window is None else ragged.band(length, window, query.device)
        out = scaled_dot_product_attention(
            query[:, :, part], key[:, :, part], value[:, :, part], attn_mask=band, scale=scale
        )
        outputs.append(out.transpose(1, 2))
        start += length
    return torch.cat(outputs, dim=1)
