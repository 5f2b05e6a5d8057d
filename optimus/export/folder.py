"""Reading a model folder without trusting it: names, links, indices, and companions of weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from optimus.export.layout import FolderError, Stored, read_header, read_json
from optimus.measure import load

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
RECORD = "optimus.json"
# Weights in other formats: a second copy at best, and a program at worst.
LEFT = frozenset(
    (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".ot", ".onnx", ".gguf")
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Read at once: enough for the disk, and nothing beside the model.
CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose headers add up; ``tensors`` are in the order of the files and their bytes."""

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, Stored]
    companions: tuple[Path, ...]


def find(source: str) -> Path:
    """The folder that ``source`` names; a hub id is fetched, without pickles and without code."""
    folder = load.local_folder(source)
    return folder if folder is not None else _fetched(source)


def _fetched(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.md", "*.tiktoken"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FolderError(f"{name}: no such folder, and the hub has none: {reason}") from error


def read_checkpoint(folder: Path) -> Checkpoint:
    """What is in the folder, without reading a weight."""
    tree = _tree(folder)
    config = read_json(inside(folder / "config.json", tree))
    if not isinstance(config, dict):
        raise FolderError(f"{folder}: config.json is not a table.")
    tensors: dict[str, Stored] = {}
    for name, wanted in _weight_files(folder, tree).items():
        held = read_header(inside(folder / name, tree))
        if lost := next((key for key in wanted or () if key not in held), None):
            raise FolderError(f"{folder}: the index places {lost!r} in {name}, which lacks it.")
        if twice := next((key for key in held if key in tensors), None):
            raise FolderError(f"{folder}: {twice!r} is in {tensors[twice].file.name} and {name}.")
        tensors.update({key: one for key, one in held.items() if wanted is None or key in wanted})
    return Checkpoint(folder, config, tensors, tuple(_companions(folder, tree)))


def _tree(folder: Path) -> Path:
    """What links may lead to: a snapshot in the hub's cache is made of links into its ``blobs``."""
    here = folder.resolve()
    cached = here.parent.name == "snapshots" and (here.parents[1] / "blobs").is_dir()
    return here.parents[1] if cached else here


def inside(file: Path, tree: Path) -> Path:
    """The file; ``FolderError`` where it is none, or a link leads out of the tree."""
    try:
        found = file.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise FolderError(f"{file.name!r} is named in the folder and cannot be read.") from error
    if not found.is_relative_to(tree):
        raise FolderError(f"{file.name} is a link that leads out of {file.parent}.")
    if not found.is_file():
        raise FolderError(f"{file} is not a file.")
    return file


def _weight_files(folder: Path, tree: Path) -> dict[str, set[str] | None]:
    """The files of weights, and which tensors the index places in each; None for all of them."""
    if (folder / INDEX).exists() or (folder / INDEX).is_symlink():
        return _indexed(read_json(inside(folder / INDEX, tree)))
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    if not found:
        _complain_of_none(folder)
    if SINGLE in found:
        return {SINGLE: None}
    return dict.fromkeys(found, None)


def _complain_of_none(folder: Path) -> None:
    if pickles := sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES):
        raise FolderError(
            f"{folder} has its weights only as a pickle ({pickles[0]}), and opening a pickle can "
            "run code. Save them as safetensors with transformers first, if you trust them."
        )
    raise FolderError(f"{folder} has no weights: no *.safetensors file in it.")


def _indexed(index: Any) -> dict[str, set[str] | None]:
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise FolderError(f"{INDEX} has no weight_map.")
    files: dict[str, set[str] | None] = {}
    for key, name in places.items():
        if not isinstance(name, str) or not _is_plain(name):
            raise FolderError(f"{INDEX} places {key[:80]!r} outside the folder: {name!r:.80}.")
        wanted = files.setdefault(name, set())
        assert wanted is not None
        wanted.add(key)
    return dict(sorted(files.items()))


def _is_plain(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return (
        len(parts) == 1 and "\\" not in name and "\0" not in name and name.endswith(".safetensors")
    )


def _companions(folder: Path, tree: Path) -> Iterator[Path]:
    """Tokenizer, chat template, model card and whatever else is no weight, relative."""
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        weights = len(name.parts) == 1 and (file.suffix == ".safetensors" or name.name == INDEX)
        other = file.suffix in LEFT or ".index." in file.name
        ours = name.as_posix() in ("config.json", RECORD)
        if hidden or weights or other or ours or (file.is_dir() and not file.is_symlink()):
            continue
        yield inside(file, tree).relative_to(folder)


def chunks(stored: Stored, size: int = CHUNK) -> Iterator[memoryview]:
    """The tensor's bytes, a few at a time; each is gone when the next but one is asked for."""
    buffers: list[memoryview] = []
    left = stored.nbytes
    with stored.file.open("rb", buffering=0) as data:
        data.seek(stored.start)
        while left:
            # The second only where it is needed; from then on they take turns.
            if len(buffers) < 2:
                buffers.append(memoryview(bytearray(min(size, left))))
            buffers.reverse()
            part = buffers[0][: min(size, left)]
            if not _fill(data, part):
                raise FolderError(f"{stored.file.name} became shorter while it was read.")
            left -= len(part)
            yield part


def _fill(data: Any, part: memoryview) -> bool:
    done = 0
    while done < len(part):
        count = data.readinto(part[done:])
        if not count:
            return False
        done += count
    return True


def digest_of(stored: Stored) -> str:
    """SHA-256 of the tensor's bytes, as ``optimus.core.originals.digest`` has it."""
    hasher = hashlib.sha256()
    for part in chunks(stored):
        hasher.update(part)
    return hasher.hexdigest()
