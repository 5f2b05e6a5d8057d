"""The original back out of a converted folder: from its source, or from what was not changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from optimus.core.errors import IrreversibleError, OptimusError
from optimus.export import record
from optimus.export.folder import INDEX, RECORD, Checkpoint, chunks, find, read_checkpoint
from optimus.export.layout import FolderError, read_header
from optimus.export.place import demand_room, making, refuse_out


@dataclass(frozen=True, slots=True)
class Restored:
    """Where the original is now, where it came from, and how many tensors have their digests."""

    back: Path
    source: Path
    tensors: int


def restore(
    out: Path,
    back: Path | None = None,
    *,
    expect: Callable[[int], None] = lambda count: None,
    tick: Callable[[str], None] = lambda what: None,
) -> Restored:
    """Write the original of the converted folder ``out`` to the new folder ``back``, bitwise.

    Every tensor is compared with the digest in the record while it is copied. ``back`` is
    ``OUT-original`` unless given. ``IrreversibleError`` where no folder holds the same bytes.
    """
    if not out.is_dir():
        raise FolderError(f"{out}: no such folder.")
    converted = read_checkpoint(out)
    known = record.read(out)
    back = back or out.with_name(f"{out.name}-original")
    source = _source(out, known, converted)
    refuse_out(back, source.folder)
    refuse_out(back, out)
    files = sorted({one.file for one in source.tensors.values()})
    demand_room(back, sum(file.stat().st_size for file in files))
    expect(len(files))
    with making(back, json.dumps([str(out.resolve()), known.source])) as place:
        for file in files:
            _copy(place.tree / file.name, file, known.digests)
            tick(file.name)
        _others(place.tree, source, known, own=source.folder == converted.folder)
    return Restored(back, source.folder, len(known.digests))


def _source(out: Path, known: record.Record, converted: Checkpoint) -> Checkpoint:
    """The recorded source, if it is still there; else the folder itself, if it lost nothing."""
    try:
        name = known.source if known.hub else os.path.normpath(out.resolve() / known.source)
        found = read_checkpoint(find(str(name)))
        lost = sorted(set(known.digests) - set(found.tensors))
        why = f"it lacks {lost[0]}" if lost else ""
    except OptimusError as error:
        found, why = converted, str(error)
    if not why:
        return found
    if set(converted.tensors) == set(known.digests):
        return converted
    raise IrreversibleError(
        f"{out} cannot be reversed: its tensors were rounded, and the source {known.source} that "
        f"is recorded in {RECORD} cannot be used ({why.rstrip('.')})."
    )


def _copy(file: Path, source: Path, digests: Mapping[str, str]) -> None:
    """One file as it is, with every tensor of the record held to its digest on the way."""
    tensors = list(read_header(source).values())
    first = tensors[0].start if tensors else source.stat().st_size
    with source.open("rb") as data, file.open("wb") as out:
        out.write(data.read(first))
        for one in tensors:
            hasher = hashlib.sha256()
            for part in chunks(one):
                hasher.update(part)
                out.write(part)
            if hasher.hexdigest() != digests.get(one.name, hasher.hexdigest()):
                raise IrreversibleError(
                    f"{source} is no longer what was converted: {one.name} holds other bytes."
                )
        out.flush()
        os.fsync(out.fileno())


def _others(tree: Path, source: Checkpoint, known: record.Record, *, own: bool) -> None:
    for name in (*source.companions, Path("config.json"), Path(INDEX)):
        if (source.folder / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.folder / name, tree / name)
    if own:
        config = json.dumps(known.config, indent=2, ensure_ascii=False) + "\n"
        (tree / "config.json").write_text(config, encoding="utf-8")
        card = tree / record.CARD
        if card.is_file():
            text = record.without_section(card.read_text(encoding="utf-8"))
            card.write_text(text, encoding="utf-8") if text else card.unlink()
