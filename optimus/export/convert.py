"""A model folder in, a folder out that others can read: tensor by tensor, all of it or nothing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimus.export import record
from optimus.export.folder import (
    INDEX,
    RECORD,
    SINGLE,
    Checkpoint,
    digest_of,
    find,
    read_checkpoint,
)
from optimus.export.layout import FolderError, Shape, read_header
from optimus.export.outline import Outline, Step, outline, shards, skeleton
from optimus.export.place import Place, demand_room, making, refuse_out
from optimus.export.shard import write_shard

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# What the files beside the weights may need on top of their own sizes.
SLACK = 1 << 20


@dataclass(frozen=True, slots=True)
class Converted:
    """What was read and what was written, in bytes of tensors."""

    out: Path
    read: int
    written: int
    rounded: int
    resumed: int


def size(text: str) -> int:
    """Bytes in ``"500MB"`` or ``"2GB"``; decimal units, as transformers has them."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|TB)", text.strip(), re.IGNORECASE)
    number = float(found[1]) * UNITS[found[2].upper()] if found else 0
    if number < 1:
        raise FolderError(f"--shards {text}: give a number and KB, MB, GB or TB, such as 2GB.")
    return int(number)


def convert(
    model: str,
    out: Path,
    recipe: str = "auto",
    *,
    dtype: str | None = None,
    shard: int | None = None,
    expect: Callable[[int], None] = lambda count: None,
    tick: Callable[[str], None] = lambda what: None,
) -> Converted:
    """Write ``model`` to the new folder ``out``; ``shard`` is the most bytes of a file of weights.

    Raises ``OptimusError`` for input that cannot be read, planned or written; nothing is left then.
    A run that was killed is taken up where it was.
    """
    folder = find(model)
    refuse_out(out, folder)
    source = read_checkpoint(folder)
    made = outline(source, recipe, dtype)
    hub = "" if Path(model).expanduser().exists() else model
    parts = list(shards(made.steps, shard))
    written = sum(one.nbytes for step in made.steps for one in step.outcomes)
    demand_room(out, written + SLACK + sum((folder / n).stat().st_size for n in source.companions))
    expect(len(made.steps))
    with making(out, _fingerprint(source, made, recipe, parts)) as place:
        resumed = len(place.done)
        digests = _weights(place, parts, tick)
        _companions(place.tree, source)
        _papers(place.tree, source, made, recipe, out, digests, hub)
    read = sum(step.source.nbytes for step in made.steps)
    return Converted(out, read, written, len(made.rounded), resumed)


def _fingerprint(source: Checkpoint, made: Outline, recipe: str, parts: list[list[Step]]) -> str:
    """What the bytes of the result depend on."""
    files = sorted({one.file for one in source.tensors.values()})
    stats = [(file.name, (s := file.stat()).st_size, s.st_mtime_ns) for file in files]
    steps = [[(s.source.name, s.source.start, str(s.outcomes)) for s in part] for part in parts]
    facts = [str(source.folder.resolve()), recipe, made.plan.to_json(), stats, steps]
    return hashlib.sha256(json.dumps([*facts, record.versions()]).encode()).hexdigest()


def _names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]


def _weights(place: Place, parts: list[list[Step]], tick: Callable[[str], None]) -> dict[str, str]:
    """Every shard and the index; the digests of the source."""
    digests: dict[str, str] = {}
    # The disk takes one file while the next is made.
    with ThreadPoolExecutor(1) as disk:
        waiting = []
        for name, steps in zip(_names(len(parts)), parts, strict=True):
            file = place.tree / name
            if not _is_done(file, place.done.get(name)):
                read, wrote = write_shard(file.with_suffix(".part"), steps, tick)
                place.done[name] = {"read": read, "wrote": wrote}
                waiting.append(disk.submit(_settle, place, file))
            else:
                for step in steps:
                    tick(step.source.name)
            digests.update(place.done[name]["read"])
        for one in waiting:
            one.result()
    if len(parts) > 1:
        (place.tree / INDEX).write_text(_index(parts), encoding="utf-8")
    return digests


def _settle(place: Place, file: Path) -> None:
    """A file that is on the disk gets its name, and then its line in the journal."""
    part = file.with_suffix(".part")
    with part.open("rb") as written:
        os.fsync(written.fileno())
    part.rename(file)
    place.note(file.name, place.done[file.name])


def _is_done(file: Path, facts: Any) -> bool:
    """Whether an earlier run wrote just this; its bytes are read again to know."""
    if facts is None or not file.is_file():
        return False
    try:
        held = read_header(file)
    except FolderError:
        return False
    return bool({name: digest_of(one) for name, one in held.items()} == facts["wrote"])


def _index(parts: list[list[Step]]) -> str:
    written: dict[str, str] = {}
    total = 0
    for name, steps in zip(_names(len(parts)), parts, strict=True):
        shapes: list[Shape] = [one for step in steps for one in step.outcomes]
        written.update({one.name: name for one in shapes})
        total += sum(one.nbytes for one in shapes)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(written.items()))}
    return json.dumps(index, indent=2, ensure_ascii=False) + "\n"


def _companions(tree: Path, source: Checkpoint) -> None:
    for name in source.companions:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / name, tree / name)


def _papers(
    tree: Path,
    source: Checkpoint,
    made: Outline,
    recipe: str,
    out: Path,
    digests: dict[str, str],
    hub: str,
) -> None:
    """The config, the model card and the record."""
    # The source's card: in the tree there may be one that a killed run has written to.
    card = source.folder / record.CARD
    before = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    (tree / record.CARD).write_text(record.card(before, made, recipe), encoding="utf-8")
    config = record.config(made, source, skeleton(source))
    (tree / "config.json").write_text(config, encoding="utf-8")
    said = record.text(made, recipe, source, out, digests, hub)
    (tree / RECORD).write_text(said, encoding="utf-8")
