"""Writing one file of tensors, a few megabytes at a time.

safetensors writes a file from tensors that are all in memory. Here the header is written first,
since shapes and dtypes are known from the outline, and the bytes follow as they are made: memory
does not grow with the shard, nor with the tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimus.export import formats
from optimus.export.folder import CHUNK, chunks
from optimus.export.layout import FolderError, Stored, make_header
from optimus.export.outline import Step
from optimus.ops.quantized import QuantizedWeight, Scheme, unfit

Digests = dict[str, str]


def write_shard(
    file: Path, steps: list[Step], tick: Callable[[str], None]
) -> tuple[Digests, Digests]:
    """Write, and return the SHA-256 of every tensor read and of every tensor written."""
    header, places = make_header(one for step in steps for one in step.outcomes)
    read: Digests = {}
    wrote: Digests = {}
    with file.open("wb") as out, ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        out.write(header)
        for step in steps:
            hashes = _Hashes((one, other))
            makers = _rounded(step, hashes) if step.scheme else _cast(step, hashes)
            at = dict(places)
            for name, part in makers:
                out.seek(at[name])
                out.write(part)
                at[name] += len(part)
                hashes.turn()
            hashes.settle()
            read[step.source.name] = hashes.digest("")
            wrote.update({one.name: hashes.digest(one.name) for one in step.outcomes})
            tick(step.source.name)
    return read, wrote


class _Hashes:
    """Digests that are made on other threads while the bytes are written; "" is the source."""

    def __init__(self, pool: Sequence[ThreadPoolExecutor]) -> None:
        self.pool = pool
        self.hashers: dict[str, Any] = {}
        self.same: dict[str, str] = {}
        self.waiting: list[Any] = []
        self.fresh: list[Any] = []

    def add(self, name: str, part: memoryview) -> None:
        hasher = self.hashers.setdefault(name, hashlib.sha256())
        # Two parts of one tensor must not overtake each other.
        self.fresh.append(self.pool[name != ""].submit(hasher.update, part))

    def turn(self) -> None:
        """Wait for all but the last part: the buffer of the one before is used again."""
        for one in self.waiting:
            one.result()
        self.waiting, self.fresh = self.fresh, []

    def settle(self) -> None:
        """Wait for all."""
        self.turn()
        self.turn()

    def digest(self, name: str) -> str:
        found: str = self.hashers.get(self.same.get(name, name), hashlib.sha256()).hexdigest()
        return found


def _cast(step: Step, hashes: _Hashes) -> Iterator[tuple[str, memoryview]]:
    source, outcome = step.source, step.outcomes[0]
    for part in chunks(source):
        hashes.add("", part)
        if outcome.dtype == source.dtype:
            hashes.same[outcome.name] = ""
            yield outcome.name, part
            continue
        wide = torch.frombuffer(part, dtype=source.dtype)
        narrow = wide.to(outcome.dtype)
        if not bool(narrow.isfinite().all()) and bool((narrow.isinf() & ~wide.isinf()).any()):
            raise FolderError(f"{source.name} has numbers beyond {outcome.dtype}; use bfloat16.")
        made = _bytes(narrow)
        hashes.add(outcome.name, made)
        yield outcome.name, made


def _rounded(step: Step, hashes: _Hashes) -> Iterator[tuple[str, memoryview]]:
    """A few rows at a time; a row's codes depend on no other row."""
    source, scheme = step.source, step.scheme
    assert scheme is not None
    codes, *others = step.outcomes
    rows, width = source.shape
    line = width * source.dtype.itemsize
    scales = []
    for part in chunks(source, max(1, CHUNK // line) * line):
        hashes.add("", part)
        made, scale = formats.written(_round(source, part, scheme))
        scales.append(scale)
        packed = _bytes(made)
        hashes.add(codes.name, packed)
        yield codes.name, packed
    if len(others) == 2:
        yield _whole(others[0].name, torch.tensor([rows, width]), hashes)
    yield _whole(others[-1].name, torch.cat(scales), hashes)


def _round(source: Stored, part: memoryview, scheme: Scheme) -> QuantizedWeight:
    weight = torch.frombuffer(part, dtype=source.dtype).view(-1, source.shape[1])
    if refusal := unfit(weight, scheme):
        raise FolderError(f"{source.name} cannot be rounded: {refusal.reason}.")
    return QuantizedWeight(weight, scheme)


def _whole(name: str, tensor: Tensor, hashes: _Hashes) -> tuple[str, memoryview]:
    made = _bytes(tensor)
    hashes.add(name, made)
    return name, made


def _bytes(tensor: Tensor) -> memoryview:
    numbers: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)
