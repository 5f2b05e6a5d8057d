"""What a safetensors file says of itself, believed only where it adds up.

The format is that of https://github.com/huggingface/safetensors: eight bytes of length, a header
of JSON, and the tensors' bytes, without a gap and in the order of their offsets.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from optimus.core.errors import OptimusError

# The format's own bound on a header, and ours on every other file of JSON that is read.
LONGEST_HEADER = 100_000_000
LONGEST_JSON = 64_000_000
# More dimensions than any tensor has; a product of fewer sizes is quick.
MOST_DIMENSIONS = 64

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


class FolderError(OptimusError, ValueError):
    """A folder that cannot be read safely, or cannot be written."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor without its numbers."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Stored(Shape):
    """A tensor in a file; ``start`` is where its bytes begin, from the beginning of the file."""

    file: Path
    start: int


def parse_json(text: bytes, what: str) -> Any:
    """The value; ``FolderError`` for text that is none, nests too deep or names a key twice."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except FolderError as error:
        raise FolderError(f"{what}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise FolderError(f"{what} is not JSON that can be read: {error}") from error


def read_json(file: Path) -> Any:
    """The value in a file of at most 64 MB."""
    try:
        size = file.stat().st_size
        if size > LONGEST_JSON:
            raise FolderError(f"{file.name} has {size:,} bytes, and {LONGEST_JSON:,} are read.")
        text = file.read_bytes()
    except OSError as error:
        raise FolderError(f"cannot read {file.name}: {error.strerror}.") from error
    return parse_json(text, file.name)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise FolderError(f"the key {name[:80]!r} is there twice")
        found[name] = value
    return found


def read_header(file: Path) -> dict[str, Stored]:
    """Every tensor of a file by its name, in the order of their bytes."""
    try:
        size = file.stat().st_size
        with file.open("rb") as data:
            prefix = data.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length > min(size - 8, LONGEST_HEADER):
                raise FolderError(f"{file.name} is damaged or cut short: its header does not fit.")
            header = parse_json(data.read(length), f"the header of {file.name}")
    except OSError as error:
        raise FolderError(f"cannot read {file.name}: {error.strerror}.") from error
    if not isinstance(header, dict):
        raise FolderError(f"the header of {file.name} is not a table of tensors.")
    header.pop("__metadata__", None)
    start = 8 + length
    found = [_stored(file, *one, start) for one in header.items()]
    return _in_order(found, file, start, size)


def _in_order(
    found: list[tuple[Stored, int]], file: Path, last: int, size: int
) -> dict[str, Stored]:
    found.sort(key=lambda one: (one[0].start, one[1]))
    for one, end in found:
        if one.start != last:
            raise FolderError(f"{file.name}: {one.name!r} overlaps, leaves a gap or is cut short.")
        last = end
    if last != size:
        raise FolderError(f"{file.name} is damaged: its tensors do not fill it.")
    return {one.name: one for one, _ in found}


def _stored(file: Path, name: str, entry: Any, base: int) -> tuple[Stored, int]:
    if not isinstance(entry, dict) or not _is_text(name):
        raise FolderError(f"the header of {file.name} has no tensor under {ascii(name)[:80]}.")
    dtype = DTYPES.get(str(entry.get("dtype")))
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if dtype is None:
        raise FolderError(f"{file.name}: {name!r} has an unknown dtype.")
    if not _are_sizes(shape) or len(shape) > MOST_DIMENSIONS:
        raise FolderError(f"{file.name}: {name!r} has no shape that a tensor can have.")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise FolderError(f"{file.name}: {name!r} has no place in the file.")
    stored = Stored(name, dtype, tuple(shape), file, base + offsets[0])
    if stored.nbytes != offsets[1] - offsets[0]:
        raise FolderError(f"{file.name}: {name!r} has another size than its shape needs.")
    return stored, base + offsets[1]


def _is_text(name: str) -> bool:
    try:
        return bool(name.encode("utf-8"))
    except UnicodeEncodeError:  # half of a surrogate pair, which no file can hold
        return False


def _are_sizes(found: Any) -> bool:
    return isinstance(found, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in found)


def make_header(shapes: Iterable[Shape]) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file of these tensors, and where the bytes of each belong.

    Those of wider numbers come first, so that each lies at a multiple of its number's size.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for one in sorted(shapes, key=lambda one: (-one.dtype.itemsize, one.name)):
        place = [at, at := at + one.nbytes]
        code = CODES[one.dtype]
        header[one.name] = {"dtype": code, "shape": list(one.shape), "data_offsets": place}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    places = {k: 8 + len(text) + v["data_offsets"][0] for k, v in header.items() if "dtype" in v}
    return struct.pack("<Q", len(text)) + text, places
