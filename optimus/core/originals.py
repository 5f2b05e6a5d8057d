"""Where the originals of lossy changes wait, so that the undo of the lossy is lossless.

``host`` keeps them in the host's memory, ``disk`` in one safetensors file that goes with the model,
``source`` in the checkpoint that the model was loaded from, found again by digest, and ``none``
nowhere. Everything that can fail fails in the keeper, before the first original is dropped.
"""

from __future__ import annotations

import copy
import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from optimus.core.canonical import Placeholder, like, placeholder
from optimus.core.errors import IrreversibleError, PlanError, SurgeryError
from optimus.core.memory import evict
from optimus.core.paths import is_part

Keep = Literal["host", "disk", "source", "none"]
KEEPS: tuple[Keep, ...] = get_args(Keep)
# Whose memory is the host's, or nobody's.
HOSTS = ("cpu", "meta")


@dataclass(slots=True)
class Original:
    """One parameter that is away: in memory, or in a file and known by its digest.

    ``twin`` says where it belongs, if that is not where it waits.
    """

    name: str
    value: nn.Parameter | None = None
    file: Path | None = None
    digest: str = ""
    twin: Placeholder | None = None
    folder: _Folder | None = None

    @property
    def lost(self) -> bool:
        """Whether there is nothing to fetch."""
        return self.value is None and self.file is None

    def fetch(self, *, home: bool = True) -> nn.Parameter:
        """The original; ``IrreversibleError`` if it was not kept or its file has changed.

        ``home``: on the device of its slot, and not on the one where it waits.
        """
        if self.value is not None:
            if not home or self.twin is None or self.twin.device == self.value.device:
                return self.value
            return like(self.value, self.value.to(self.twin.device))
        if self.file is None or self.twin is None:
            raise IrreversibleError(
                f"the original of {self.name} was not kept (keep='none'). Load the model again "
                "from its checkpoint, or transform with keep='host', 'disk' or 'source'."
            )
        found = self._read(self.file)
        return like(self.twin, found.to(self.twin.device) if home else found)

    def merge(self, current: Tensor, narrow: Tensor | None = None) -> nn.Parameter:
        """The original, with what was written into ``current``, the value in use, meanwhile.

        An element that is no longer the original's cast, or no longer ``narrow``, was written by
        somebody, and survives.
        """
        if is_part(current):
            raise SurgeryError(
                f"{self.name} was cast or rounded, and sharded after that: what this process holds "
                "is a part, and its original is whole. Save before you shard, or shard the stock "
                "model."
            )
        original = self.fetch()
        if current.is_meta:  # accelerate offloaded it, and nobody could write into it here
            return original
        narrow = original.detach().to(current.dtype) if narrow is None else narrow
        same = _bits(narrow) == _bits(current.detach())
        if bool(same.all()):
            return original
        merged = torch.where(same, original.detach(), current.detach().to(original.dtype))
        # Kept, so that two slots that share this original go on sharing one object.
        self.value = like(original, merged)
        return self.value

    def update(self, value: Tensor) -> None:
        """A new original, as a checkpoint loaded into the transformed model brings it."""
        old = self.value if self.value is not None else self.twin
        assert old is not None
        self.value = like(old, value.detach().to(old.device, old.dtype, copy=True))

    def hold(self, value: nn.Parameter) -> None:
        """``value`` is the original from now on; in memory only if the file has other bytes."""
        known = self.file is not None and digest(value) == self.digest
        self.put(value)
        self.value = None if known else self.value

    def put(self, value: nn.Parameter) -> None:
        """``value``, of the slot's own device, waits on the host from now on."""
        host = value.device.type in HOSTS
        self.twin = None if host and self.file is None else placeholder(value)
        self.value = value if host else like(value, value.detach().cpu())

    def forget(self) -> None:
        """Let go of what is in memory."""
        if self.value is not None:
            evict(self.value)
        self.value = None

    def _read(self, file: Path) -> Tensor:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="pt") as tensors:
                value: Tensor = tensors.get_tensor(self.name)
        except (OSError, SafetensorError) as error:
            raise IrreversibleError(
                f"the original of {self.name} cannot be read back from {file}: {error}"
            ) from error
        if digest(value) != self.digest:
            raise IrreversibleError(
                f"{file} has changed since the transform: {self.name} holds other bytes. "
                "Restore that file, or load the model again."
            )
        return value.clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> Original:
        value = copy.deepcopy(self.value, memo)
        return Original(self.name, value, self.file, self.digest, self.twin, self.folder)


Keeper = Callable[[nn.Module, Mapping[str, nn.Parameter]], dict[str, Original]]


def on_host(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, Original]:
    """``keep="host"``: the parameters themselves, at the cost of their memory; from other devices
    they are moved to the host's.
    """
    return _shared((names, _on_host(names[0], value)) for names, value in _tied(parameters))


def _on_host(name: str, value: nn.Parameter) -> Original:
    original = Original(name)
    original.put(value)
    return original


class _Folder:
    """A temporary folder that goes with the last original in it, and without a warning."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="optimus-originals-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def on_disk(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, Original]:
    """``keep="disk"``: one file in a temporary folder that lives as long as the originals.

    Raises ``OSError`` before anything is written if the disk is too full.
    """
    from safetensors.torch import save_file

    groups = list(_tied(parameters))
    tensors = {names[0]: value.detach().contiguous() for names, value in groups}
    folder = _Folder()
    needed = sum(t.numel() * t.element_size() for t in tensors.values())
    free = shutil.disk_usage(folder.path).free
    if needed > free:
        raise OSError(f"keep='disk' needs {needed:,} bytes in {folder.path}, which has {free:,}.")
    file = folder.path / "originals.safetensors"
    save_file(tensors, file)
    return _shared(
        (names, Original(names[0], None, file, digest(value), placeholder(value), folder))
        for names, value in groups
    )


def in_source(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, Original]:
    """``keep="source"``: the folder that the model was loaded from, if it holds the same bytes.

    Raises ``PlanError`` if a tensor is missing there or differs.
    """
    held = {key: file for file in _source_files(model) for key in _keys(file)}
    return _shared((names, _in_source(held, names, value)) for names, value in _tied(parameters))


def _in_source(held: Mapping[str, Path], names: tuple[str, ...], value: nn.Parameter) -> Original:
    name = next((n for n in names if n in held), None)
    if name is None:
        raise PlanError(
            f"keep='source': the checkpoint has no {names[0]}. Use keep='host' or 'disk'."
        )
    original = Original(name, None, held[name], digest(value), placeholder(value))
    try:
        original.fetch()
    except IrreversibleError as error:
        raise PlanError(
            f"keep='source': {name} in {held[name]} is not what the model holds; it was trained or "
            "cast since. Use keep='host' or 'disk'."
        ) from error
    return original


def _source_files(model: nn.Module) -> list[Path]:
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or ""
    folder = Path(name)
    files = sorted(folder.glob("*.safetensors")) if name and folder.is_dir() else []
    if not files:
        raise PlanError(
            f"keep='source' needs a model loaded from a folder of safetensors files, and {name!r} "
            "is none. Use keep='host' or 'disk'."
        )
    return files


def _keys(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


def _tied(parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[tuple[str, ...], nn.Parameter]]:
    """Each parameter object once, with all its names: a tie must not be written twice."""
    names: dict[int, list[str]] = {}
    for name, value in parameters.items():
        names.setdefault(id(value), []).append(name)
    for group in names.values():
        yield tuple(group), parameters[group[0]]


def _shared(groups: Iterable[tuple[tuple[str, ...], Original]]) -> dict[str, Original]:
    return {name: original for names, original in groups for name in names}


def demand(originals: Iterable[Original]) -> None:
    """``IrreversibleError`` where one is lost: nobody may write a checkpoint of originals then."""
    if any(original.lost for original in originals):
        raise IrreversibleError(
            "the originals were not kept (keep='none'), so save_pretrained cannot write them. "
            "Write model.state_dict() with safetensors to keep the values in use, or load the "
            "model again and transform with keep='host', 'disk' or 'source'."
        )


def _bits(tensor: Tensor) -> Tensor:
    """NaN equals itself here, and zero does not equal minus zero."""
    return tensor.contiguous().view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )


def digest(tensor: Tensor) -> str:
    """SHA-256 of the tensor's bytes."""
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


# "none" holds them until the transform is committed: a failed check must still be able to undo.
KEEPERS: dict[Keep, Keeper] = {
    "host": on_host,
    "disk": on_disk,
    "source": in_source,
    "none": on_host,
}
