"""Attention over the real tokens of a ragged batch, laid end to end."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from optimus.ops.attention import MOST_KEYS, takes, within

# Where one kernel takes all sequences, of what dtypes, and of how wide a head.
DEVICES = ("cuda",)
HALVES = (torch.bfloat16, torch.float16)
WIDEST, MULTIPLE = 256, 8


@functools.cache
def packed_kernel() -> Callable[..., Any] | None:
    """torch's attention over sequences that lie end to end; None where it has none, or one that
    takes no scale or no window.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    wanted = {"scale", "window_size"}
    return varlen_attn if wanted <= inspect.signature(varlen_attn).parameters.keys() else None


def packs_heads(dim: int) -> bool:
    """Whether the kernel takes heads of that width."""
    return dim <= WIDEST and not dim % MULTIPLE


class Sequences:
    """Sequences that lie end to end: their ``lengths``, and the ``places [total]`` in its padded
    row that each token came from, which a window counts by.

    ``causal``: no token sees a later one. ``states``, where it is a dict, takes the keys and values
    of every layer, ``[1, heads, total, dim]`` each. ``uses``: how often attention went by them.
    """

    def __init__(self, lengths: Sequence[int], places: Tensor, *, causal: bool = False) -> None:
        self.lengths = tuple(lengths)
        self.places = places
        self.causal = causal
        self.uses = 0
        self.states: dict[int, tuple[Tensor, Tensor]] | None = None
        self._bands: dict[tuple[int, int], Tensor | None] = {}

    @functools.cached_property
    def starts(self) -> Tensor:
        """``[sequences + 1]`` int32: where each begins, and the end of the last."""
        ends = list(itertools.accumulate(self.lengths, initial=0))
        return torch.tensor(ends, dtype=torch.int32, device=self.places.device)

    @functools.cached_property
    def is_dense(self) -> bool:
        """Whether no sequence has padding inside, so that places are apart as tokens are."""
        starts = self.starts.long()
        first, last = self.places[starts[:-1]], self.places[starts[1:] - 1]
        return bool((last - first + 1 == starts.diff()).all())

    def band(self, start: int, length: int, window: int) -> Tensor | None:
        """For the sequence at ``start``: True where a token sees another that is at most ``window``
        places apart; None where all are.
        """
        if (start, window) not in self._bands:
            at = self.places[start : start + length]
            apart = at[:, None] - at
            near = apart.abs() <= window
            seen = near & (apart >= 0) if self.causal else near
            self._bands[start, window] = None if bool(near.all()) else seen
        return self._bands[start, window]


class Ragged:
    """Where the real tokens of a padded batch ``[batch, length]`` are.

    ``index [total]``: their places in the flattened batch. ``lengths``: how many each row has;
    rows without any do not appear. Padding may be anywhere in a row.
    """

    def __init__(self, mask: Tensor) -> None:
        self.batch, self.length = mask.shape
        self.index = mask.reshape(-1).nonzero().squeeze(1)
        self.lengths = [n for n in mask.sum(1).tolist() if n]

    def pack(self, padded: Tensor) -> Tensor:
        """``[batch or 1, length, ...]`` to ``[1, total, ...]``."""
        rows = padded.expand(self.batch, *padded.shape[1:]).reshape(-1, *padded.shape[2:])
        return rows.index_select(0, self.index).unsqueeze(0)

    def unpack(self, *pieces: Tensor) -> Tensor:
        """``[1, total, ...]``, in pieces or whole, to ``[batch, length, ...]``, zero where there is
        no token.
        """
        shape = pieces[0].shape[2:]
        rows, start = pieces[0].new_zeros(self.batch * self.length, *shape), 0
        for piece in pieces:
            end = start + piece.shape[1]
            # In place, and each piece by itself: all the logits of a batch are large.
            rows.index_copy_(0, self.index[start:end], piece[0])
            start = end
        return rows.view(self.batch, self.length, *shape)

    def pieces(self, most: int, *, causal: bool = False) -> Iterator[tuple[slice, Sequences]]:
        """Whole sequences, up to ``most`` tokens a piece: their tokens, and their lengths."""
        start, end = 0, 0
        piece: list[int] = []
        for length in self.lengths:
            if piece and end + length - start > most:
                yield self._piece(start, end, piece, causal)
                start, piece = end, []
            piece.append(length)
            end += length
        yield self._piece(start, end, piece, causal)

    def _piece(
        self, start: int, end: int, lengths: list[int], causal: bool
    ) -> tuple[slice, Sequences]:
        places = self.index[start:end] % self.length
        return slice(start, end), Sequences(lengths, places, causal=causal)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attention within each sequence: ``[1, heads, total, dim]`` in, ``[1, total, heads, dim]``
    out. Keys and values may have fewer heads, each for as many heads of the queries.

    One kernel call for all where there is such a kernel, else one a sequence: no sequence can see
    another, and no mask is needed. CUDA's was called as documented and never run here.
    """
    sequences.uses += 1
    lengths = sequences.lengths
    kernel = packed_kernel()
    if kernel is not None and _fits(query, value) and (window is None or sequences.is_dense):
        return _in_one_call(kernel, (query, key, value), sequences, scale=scale, window=window)
    if window is None and max(lengths) <= MOST_KEYS and takes(query, key, value):
        return within(query, key, value, lengths, causal=sequences.causal, scale=scale)
    outputs, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        band = None if window is None else sequences.band(start, length, window)
        out = scaled_dot_product_attention(
            query[:, :, part],
            key[:, :, part],
            value[:, :, part],
            attn_mask=band,
            is_causal=sequences.causal and band is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(out.transpose(1, 2))
        start += length
    return torch.cat(outputs, dim=1)


def _fits(query: Tensor, value: Tensor) -> bool:
    return (
        query.device.type in DEVICES
        and query.dtype in HALVES
        and query.shape[-1] == value.shape[-1]
        and packs_heads(query.shape[-1])
    )


def _in_one_call(
    kernel: Callable[..., Any],
    states: tuple[Tensor, Tensor, Tensor],
    sequences: Sequences,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """``window`` counts as in ``varlen_attention``; the kernel says -1 for no end of it."""
    query, key, value = (one[0].transpose(0, 1) for one in states)
    options: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in inspect.signature(kernel).parameters:
            options["enable_gqa"] = True
        else:
            times = query.shape[1] // key.shape[1]
            key, value = (one.repeat_interleave(times, dim=1) for one in (key, value))
    reach = -1 if window is None else window
    longest = max(sequences.lengths)
    out: Tensor = kernel(
        query,
        key,
        value,
        sequences.starts,
        sequences.starts,
        longest,
        longest,
        scale=scale,
        window_size=(reach, 0 if sequences.causal else reach),
        **options,
    )
    return out[None]
