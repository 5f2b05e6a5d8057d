"""Everything that a call of static shapes reads and writes, at addresses that stay."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optimus.generation.buckets import Buckets

# Ends of text that a call may name; a model has up to five.
MOST_ENDS = 16
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Of one layer's keys and values: heads, and the numbers of a head."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Part:
    """Where a section of a prompt is put before it runs, each ``[batch, length]``."""

    ids: Tensor
    positions: Tensor
    live: Tensor


class Slate:
    """A cache with its rows' tokens, masks and positions: what graphs read and write in place.

    ``keys`` and ``values``: one a layer, ``[batch, heads, room, dim]``. ``live`` ``[batch, room]``:
    which of them may be looked at. ``tokens`` ``[batch, room + 1]``: what was read and written.
    ``slot`` ``[1]``: where the next token goes. ``token`` and ``position`` ``[batch, 1]``: which
    it is. ``finished`` ``[batch]``: rows that came to one of ``ends``, which go on with ``pad``.
    ``last`` ``[1]``: the last column of a section that is a token.
    """

    def __init__(self, shapes: tuple[LayerShape, ...], batch: int, buckets: Buckets) -> None:
        self.shapes, self.batch, self.buckets = shapes, batch, buckets
        # Asked here and not where a compiler traces, which would trace the class statement, too.
        self.slab = _layer_class()
        device, room = shapes[0].device, buckets.room
        self.keys = [_zeros(s, batch, s.key_heads, room, s.key_dim) for s in shapes]
        self.values = [_zeros(s, batch, s.value_heads, room, s.value_dim) for s in shapes]
        whole = functools.partial(torch.zeros, dtype=torch.long, device=device)
        truth = functools.partial(torch.zeros, dtype=torch.bool, device=device)
        self.live, self.finished = truth(batch, room), truth(batch)
        self.tokens = whole(batch, room + 1)
        self.token, self.position = whole(batch, 1), whole(batch, 1)
        self.slot, self.last, self.pad = whole(1), whole(1), whole(1)
        self.ends = whole(MOST_ENDS)
        self.parts = {
            length: Part(whole(batch, length), whole(batch, length), truth(batch, length))
            for length in buckets.lengths
        }

    def open(self, rows: int, ends: list[int], pad: int) -> None:
        """For a new prompt of so many rows; those beyond are copies, and count as finished."""
        self.live.zero_()
        self.slot.zero_()
        # Values come as tensors: a compiler that traces would take a number for a constant.
        self.finished.copy_(torch.arange(self.batch) >= rows)
        self.ends.copy_(torch.tensor(ends + [NO_TOKEN] * (MOST_ENDS - len(ends))))
        self.pad.copy_(torch.tensor([pad]))

    def load(self, length: int, ids: Tensor, positions: Tensor, live: Tensor) -> None:
        """A section of the prompt, each ``[rows, tokens]`` on the CPU, into its bucket."""
        part = self.parts[length]
        self.last.copy_(torch.tensor([ids.shape[1] - 1]))
        for target, source in ((part.ids, ids), (part.positions, positions), (part.live, live)):
            padded = torch.zeros(self.batch, length, dtype=target.dtype)
            padded[:, : source.shape[1]] = source[:1]
            padded[: source.shape[0], : source.shape[1]] = source
            target.copy_(padded)

    def state(self) -> tuple[Tensor, ...]:
        """What a graph writes besides keys and values."""
        return self.live, self.finished, self.tokens, self.token, self.position, self.slot

    def ended(self) -> Tensor:
        """``[batch]``: whose next token is an end of text."""
        return (self.token == self.ends).any(-1)

    def is_done(self) -> bool:
        """Whether every row has come to its end; waits for the device."""
        return bool((self.finished | self.ended()).all())

    def written(self) -> Tensor:
        """A copy of all ``tokens`` on the CPU."""
        return self.tokens.to("cpu", copy=True)

    def put(self, token: Tensor) -> None:
        """``[rows]``: these are the next tokens, and not the likeliest."""
        padded = token[:1].repeat(self.batch)
        padded[: len(token)] = token
        self.token.copy_(padded[:, None])

    def clear(self, window: int) -> None:
        """Forget what is in the first ``window`` slots: not a number there would stay one, also
        where a mask hides it."""
        for one in (*self.keys, *self.values):
            one[:, :, :window].zero_()


def _zeros(shape: LayerShape, *sizes: int) -> Tensor:
    return torch.zeros(sizes, dtype=shape.dtype, device=shape.device)


def layer_shapes(model: nn.Module) -> tuple[LayerShape, ...]:
    """What one token leaves in the model's own cache, layer by layer; the model runs on it."""
    from transformers.cache_utils import DynamicCache

    config: Any = model.config
    cache = DynamicCache(config=config.get_text_config(decoder=True))
    device = next(model.parameters()).device
    ids = torch.zeros(1, 1, dtype=torch.long, device=device)
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    return tuple(_shapes(cache.layers))


def _shapes(layers: list[Any]) -> Iterator[LayerShape]:
    for layer in layers:
        (_, heads, _, dim), values = layer.keys.shape, layer.values
        yield LayerShape(
            heads, dim, values.shape[1], values.shape[3], layer.keys.dtype, layer.keys.device
        )


@functools.cache
def _layer_class() -> type[Any]:
    """Made at the first use, so that importing this file does not import transformers."""
    from transformers.cache_utils import CacheLayerMixin, StaticLayer

    class Slab(StaticLayer):  # type: ignore[misc]
        """A static layer over memory that is there, which shows its first ``window`` slots."""

        def __init__(self, keys: Tensor, values: Tensor, columns: Tensor, window: int) -> None:
            CacheLayerMixin.__init__(self)
            self.keys, self.values = keys, values
            self.columns, self.max_cache_len = columns, window
            self.is_initialized = True

        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            """As the host's, at the columns that all layers share."""
            self.keys.index_copy_(2, self.columns, key_states)
            self.values.index_copy_(2, self.columns, value_states)
            window = self.max_cache_len
            return self.keys[:, :, :window], self.values[:, :, :window]

        def get_seq_length(self) -> Tensor:
            """How many tokens came before this call."""
            return self.columns[0]

    return Slab


def over(slate: Slate, columns: Tensor, window: int) -> Any:
    """A cache of transformers' over the slate's memory, for one call at those columns."""
    from transformers.cache_utils import Cache

    pairs = zip(slate.keys, slate.values, strict=True)
    return Cache(layers=[slate.slab(keys, values, columns, window) for keys, values in pairs])
