"""Where a folder is made: beside its place, under a lock, and moved there when it is whole.

A killed run leaves ``.NAME.optimus`` with a journal of the files that are complete; the next run
of the same conversion goes on from there, and any other begins anew.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from optimus.export.layout import FolderError


@dataclass(slots=True)
class Place:
    """``tree`` will be OUT; ``done`` is what the journal says of each file in it."""

    tree: Path
    journal: TextIO
    done: dict[str, Any]

    def note(self, name: str, facts: Any) -> None:
        """The file is complete, and this is known of it."""
        self.journal.write(json.dumps({"file": name, "facts": facts}) + "\n")
        self.journal.flush()
        os.fsync(self.journal.fileno())


def refuse_out(out: Path, source: Path) -> None:
    """``FolderError`` where a new folder cannot be at ``out``."""
    if out.resolve() == source.resolve():
        raise FolderError(f"{out} is the model itself. Give another folder to write.")
    if out.resolve().is_relative_to(source.resolve()):
        raise FolderError(f"{out} is inside of {source}, which must stay as it is.")
    if os.path.lexists(out):
        beside = _beside(out)
        if beside.is_dir() and not (beside / "tree").exists():
            _clear(beside)  # killed when OUT was whole already
        raise FolderError(f"{out} exists, and nothing is overwritten. Give another name.")
    if not out.parent.is_dir():
        raise FolderError(f"{out.parent} is no folder: make it first.")


@contextmanager
def making(out: Path, fingerprint: str) -> Iterator[Place]:
    """The folder to be; moved to ``out`` at the end, gone after an error, kept after a kill."""
    beside = _beside(out)
    try:
        beside.mkdir(exist_ok=True)
        with (beside / "lock").open("w") as lock:
            _lock(lock, out)
            with _place(beside, fingerprint) as place:
                yield place
                _settle(place.tree, out)
        shutil.rmtree(beside)
    except OSError as error:
        _clear(beside)
        raise FolderError(f"cannot write {out}: {error.strerror or error}.") from error
    except BusyError:
        raise
    except Exception:
        _clear(beside)
        raise


def _beside(out: Path) -> Path:
    return out.parent / f".{out.name}.optimus"


class BusyError(FolderError):
    """Another process is making the same folder."""


def _clear(beside: Path) -> None:
    shutil.rmtree(beside, ignore_errors=True)


def _lock(lock: TextIO, out: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BusyError(f"another optimus is writing {out}.") from error


@contextmanager
def _place(beside: Path, fingerprint: str) -> Iterator[Place]:
    tree, journal = beside / "tree", beside / "journal"
    done = _read(journal, fingerprint)
    if done is None:
        shutil.rmtree(tree, ignore_errors=True)
        journal.write_text(json.dumps({"fingerprint": fingerprint}) + "\n", encoding="utf-8")
    tree.mkdir(exist_ok=True)
    with journal.open("a", encoding="utf-8") as lines:
        yield Place(tree, lines, done or {})


def _read(journal: Path, fingerprint: str) -> dict[str, Any] | None:
    """What is complete, or None where the journal is of another conversion, or there is none."""
    try:
        whole, _, cut = journal.read_text(encoding="utf-8").rpartition("\n")
        first, *rest = [json.loads(line) for line in whole.splitlines()]
        if first["fingerprint"] != fingerprint:
            return None
        if cut:  # killed while it wrote a line, which a line more would spoil
            journal.write_text(whole + "\n", encoding="utf-8")
        return {line["file"]: line["facts"] for line in rest}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _settle(tree: Path, out: Path) -> None:
    if os.path.lexists(out):
        raise FolderError(f"{out} came to be meanwhile, and nothing is overwritten.")
    tree.rename(out)
    folder = os.open(out.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def demand_room(out: Path, needed: int) -> None:
    """``FolderError`` where the disk is too full; asked before anything is written."""
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise FolderError(f"{out} needs {needed:,} bytes, and the disk has {free:,} free.")
