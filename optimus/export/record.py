"""What was done to a folder, for programs (``optimus.json``) and for readers (the model card)."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimus.core.planner import Plan
from optimus.export import formats
from optimus.export.folder import RECORD, Checkpoint
from optimus.export.layout import FolderError, read_json
from optimus.export.outline import Outline

VERSION = 1
PACKAGES = ("optimus", "torch", "transformers", "safetensors", "compressed-tensors")
START, END = "\n<!-- optimus -->\n", "<!-- /optimus -->\n"
CARD = "README.md"


@dataclass(frozen=True, slots=True)
class Record:
    """``source``: the folder that was converted, relative to this one, or a hub id.

    ``digests``: SHA-256 of every tensor of the source. ``config``: the source's, as it was.
    """

    recipe: str
    plan: Plan
    source: str
    hub: bool
    digests: Mapping[str, str]
    config: Mapping[str, Any]


def versions() -> dict[str, str]:
    """Of whatever has a part in the bytes."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def text(
    made: Outline, recipe: str, source: Checkpoint, out: Path, digests: Mapping[str, str], hub: str
) -> str:
    """The content of ``optimus.json``; the same for the same input."""
    where = hub or Path(os.path.relpath(source.folder.resolve(), out.resolve())).as_posix()
    data = {
        "version": VERSION,
        "recipe": recipe,
        "plan": json.loads(made.plan.to_json()),
        "versions": versions(),
        "source": {"name": where, "hub": bool(hub), "digests": dict(sorted(digests.items()))},
        "config": source.config,
    }
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def read(folder: Path) -> Record:
    """The record of a converted folder; ``FolderError`` where it has none that can be read."""
    if not (folder / RECORD).is_file():
        raise FolderError(f"{folder} has no {RECORD}: it was not written by optimus convert.")
    data = read_json(folder / RECORD)
    try:
        source = data["source"]
        digests = {str(name): str(one) for name, one in source["digests"].items()}
        made = Plan.from_json(json.dumps(data["plan"]))
        kept = str(source["name"]), bool(source["hub"]), digests
        return Record(str(data["recipe"]), made, *kept, dict(data["config"]))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FolderError(f"{folder}: {RECORD} is damaged: {error}") from error


def config(made: Outline, source: Checkpoint, model: nn.Module) -> str:
    """``config.json`` of the result: dtypes as written, and how weights are rounded."""
    found: dict[str, Any] = dict(source.config)
    if any(one.source.dtype != one.outcomes[0].dtype for one in made.steps if not one.scheme):
        found = _with_dtype(found, str(made.dtype).removeprefix("torch."))
        found.pop("torch_dtype", None)
        found["dtype"] = str(made.dtype).removeprefix("torch.")
    if made.rounded:
        linears = [path for path, one in model.named_modules() if isinstance(one, nn.Linear)]
        found["quantization_config"] = formats.config(made.rounded, linears)
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def _with_dtype(found: dict[str, Any], dtype: str) -> dict[str, Any]:
    inner = {k: _with_dtype(v, dtype) for k, v in found.items() if isinstance(v, dict)}
    own = {key: dtype for key in ("dtype", "torch_dtype") if found.get(key) is not None}
    return {**found, **inner, **own}


def card(before: str, made: Outline, recipe: str) -> str:
    """The model card with a section about the conversion; no path of the machine is in it."""
    how = f"recipe `{recipe}`, weights in {str(made.dtype).removeprefix('torch.')}"
    lines = [START + "## Converted by optimus", "", f"Written by `optimus convert`: {how}."]
    if made.rounded:
        lines.append(
            f"{len(made.rounded)} linear layers are rounded and stored as compressed-tensors, "
            "which transformers loads where that package is installed."
        )
    used = ", ".join(f"{name} {one}" for name, one in versions().items())
    lines += [
        f"`optimus.load` gives the transformed model; `{RECORD}` has the plan and the digest of",
        "every tensor of the source.",
        f"Versions: {used}.",
        END,
    ]
    return before + "\n".join(lines)


def without_section(card: str) -> str:
    """The model card as it was."""
    head, start, rest = card.partition(START)
    return head + rest.partition(END)[2] if start else card


def dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """What the config says that the weights are in; fp32 where it says nothing."""
    named = config.get("dtype") or config.get("torch_dtype") or "float32"
    found = getattr(torch, str(named).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else torch.float32
