"""From a prompt to its answer, on one slate: the graphs in order, and the choice of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optimus.generation.buckets import Graph
from optimus.generation.slate import Slate
from optimus.generation.station import Station


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be continued, each ``[rows, tokens]``, on the CPU; ``live`` is False at padding.

    ``most`` is the greatest number of tokens to write, ``ends`` and ``pad`` are ids.
    """

    ids: Tensor
    positions: Tensor
    live: Tensor
    most: int
    ends: tuple[int, ...]
    pad: int


class Call:
    """One prompt on its way over a slate; ``end``: how many slots of it are used."""

    def __init__(self, model: nn.Module, station: Station, prompt: Prompt, slate: Slate) -> None:
        self.model, self.station, self.prompt, self.slate = model, station, prompt, slate
        self.buckets, self.end = slate.buckets, 0

    def read(self, ends: tuple[int, ...]) -> Tensor:
        """The whole prompt; the logits that its last token gives, ``[batch, vocabulary]``."""
        prompt, slate = self.prompt, self.slate
        self.station.open(slate, len(prompt.ids), list(ends), prompt.pad)
        for part in self.buckets.sections(prompt.ids.shape[1]):
            columns = slice(part.begin, part.end)
            values = (one[:, columns] for one in (prompt.ids, prompt.positions, prompt.live))
            slate.load(part.length, *values)
            logits = self._run(Graph("prefill", slate.batch, part.length, part.window))
            self.end = part.end
        return logits

    def go_on(self) -> Tensor:
        """One token more, of which the logits are returned as by ``read``."""
        self.end += 1
        return self._run(Graph("decode", self.slate.batch, 1, self.buckets.window(self.end)))

    def _run(self, graph: Graph) -> Tensor:
        return self.station.run(graph, self.model, self.slate)

    def greedy(self) -> Tensor:
        """The likeliest tokens, ``[rows, at most most]``, up to where all rows have ended."""
        prompt, looks = self.prompt, self.station.runner.looks
        self.read(prompt.ends)
        for written in range(1, prompt.most):
            if prompt.ends and written % looks == 0 and self.slate.is_done():
                break
            self.go_on()
        rows, before = prompt.ids.shape
        tokens = self.slate.written()[:rows, before : self.end + 1]
        return tokens[:, : _needed(tokens, prompt.ends)]

    def chosen(self, choose: Callable[[Tensor, Tensor], Tensor], stop: Stop) -> Tensor:
        """``[rows, tokens]`` with the prompt, by ``choose`` of ids so far and logits, as long as
        ``stop`` says of what there is that somebody goes on."""
        ids = stop.ids
        logits = self.read(())
        while True:
            token = choose(ids, logits.to(ids.device, copy=True)[: len(ids)])
            ids, going = stop(ids, token)
            if not going:
                return ids
            self.slate.put(token)
            logits = self.go_on()

    @property
    def window(self) -> int:
        """How much of the slate was written to."""
        return self.buckets.window(max(self.end, 1))


def _needed(tokens: Tensor, ends: tuple[int, ...]) -> int:
    """How many columns there are until every row has ended; all where one has not."""
    is_end = torch.isin(tokens, torch.tensor(ends, dtype=tokens.dtype))
    if not bool(is_end.any(-1).all()):
        return tokens.shape[1]
    return int(is_end.int().argmax(-1).max()) + 1


class Stop:
    """When transformers' criteria say so; tokens of rows that have stopped become padding."""

    def __init__(self, ids: Tensor, criteria: Any, pad: int | None, streamer: Any) -> None:
        self.ids, self.criteria, self.streamer = ids, criteria, streamer
        self.pad = pad if any(hasattr(one, "eos_token_id") for one in criteria) else None
        self.going = torch.ones(len(ids), dtype=torch.long, device=ids.device)

    def __call__(self, ids: Tensor, token: Tensor) -> tuple[Tensor, bool]:
        """``ids`` with ``token`` behind, and whether a row goes on."""
        if self.pad is not None:
            token.copy_(token * self.going + self.pad * (1 - self.going))
        ids = torch.cat([ids, token[:, None]], -1)
        self.going &= ~self.criteria(ids, None)
        if self.streamer is not None:
            self.streamer.put(token.cpu())
        return ids, bool(self.going.max())
