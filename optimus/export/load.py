"""A converted folder as a transformed model: rounded weights go onto the kernels as they are."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optimus.core import engine, planner
from optimus.core.backend import Backend
from optimus.core.canonical import placeholder
from optimus.core.errors import OptimusError
from optimus.core.originals import Keep, Original
from optimus.core.paths import ties
from optimus.core.recipes import STOCK, Recipe
from optimus.export import formats, record
from optimus.export.folder import RECORD, Checkpoint, chunks, find, read_checkpoint
from optimus.export.layout import FolderError, Stored
from optimus.measure import load as stock
from optimus.ops.quantized import QuantizedWeight

PARTS = re.compile(r"(.+)\.(weight_(?:packed|scale|shape|zero_point|g_idx)|input_\w+|weight)")


def load(source: str | os.PathLike[str], *, backend: str | Backend | None = None) -> nn.Module:
    """The model of a folder, transformed and ready; ``optimus.reverse`` gives the stock model.

    What ``optimus convert`` wrote is loaded by the recipe in its record. Weights that are stored
    as compressed-tensors, whoever wrote them, are not made dense where a kernel takes their layout:
    int8 a channel, int8 and int4 in groups of 32, int4 of 64 and 128, all symmetric. Reversing
    such a model reads the recorded source, and raises ``IrreversibleError`` where that is gone.

    Raises ``OptimusError`` for a folder that cannot be read, or that this machine cannot run.
    """
    folder = find(str(source))
    held = read_checkpoint(folder)
    known = record.read(folder) if (folder / RECORD).is_file() else None
    quantized = held.config.get("quantization_config")
    if quantized is not None:
        return _rounded(held, quantized, known, backend)
    model = stock.load_model(str(folder), dtype=record.dtype_of(held.config))
    recipe = known.recipe if known is not None and known.recipe != "bf16" else "auto"
    return engine.transform(model, recipe, backend=backend)


def _rounded(
    held: Checkpoint,
    quantized: Any,
    known: record.Record | None,
    backend: str | Backend | None,
) -> nn.Module:
    method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
    if method != "compressed-tensors":
        raise FolderError(
            f"{held.folder} is quantized by {str(method)[:40]}, which is not taken in: only "
            "compressed-tensors is. Load it with transformers."
        )
    formats.refuse_activations(quantized)
    codes, rest = _split(held)
    model = _dense(held, codes, rest)
    places = {path: _place(model, path) for path in codes}
    made = planner.plan(model, _recipe(model, places, codes, known), backend=backend)
    claimed = {claim.path for claim in made.claims}
    if missed := sorted(set(places.values()) - claimed):
        why = next((r.reason for path, _, r in made.refusals if path == missed[0]), "no such layer")
        raise FolderError(f"{held.folder}: {missed[0]} is rounded and cannot stay so: {why}.")
    given = {f"{places[path]}.weight": one for path, one in codes.items()}
    return engine.take_in(model, made, given, _originals(model, places, held, known))


def _place(model: nn.Module, path: str) -> str:
    """The module's path in the model: a checkpoint may have the base model's prefix, or lack it."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    known = dict(model.named_modules())
    names = (path, prefix + path, path.removeprefix(prefix))
    return next((name for name in names if name in known), path)


def _split(held: Checkpoint) -> tuple[dict[str, QuantizedWeight], dict[str, Stored]]:
    """Rounded weights by the paths of their modules, and all other tensors."""
    paths = {
        m[1] for name in held.tensors if (m := PARTS.fullmatch(name)) and m[2] == "weight_scale"
    }
    parts: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, Stored] = {}
    for name, one in held.tensors.items():
        found = PARTS.fullmatch(name)
        if found and found[1] in paths:
            parts.setdefault(found[1], {})[found[2]] = _read(one)
        else:
            rest[name] = one
    dtype = record.dtype_of(held.config)
    codes = {}
    for path in list(parts):
        codes[path] = formats.taken_in(path, parts.pop(path), dtype)
    return codes, rest


def _read(one: Stored) -> Tensor:
    if not one.nbytes:
        return torch.empty(one.shape, dtype=one.dtype)
    whole = next(chunks(one, one.nbytes))
    return torch.frombuffer(whole, dtype=one.dtype).view(one.shape)


def _dense(
    held: Checkpoint, codes: Mapping[str, QuantizedWeight], rest: Mapping[str, Stored]
) -> nn.Module:
    """The stock model, with a zero that fills the shape of every rounded weight."""
    config = stock.read_config(str(held.folder))
    config.quantization_config = None
    del config.quantization_config
    dtype = record.dtype_of(held.config)
    state = {name: _read(one) for name, one in rest.items()}
    for path, one in codes.items():
        zero = torch.zeros((), dtype=dtype)
        state[f"{path}.weight"] = zero.expand(one.out_features, one.in_features)
    return stock.from_state(str(held.folder), config, state, dtype)


def _recipe(
    model: nn.Module,
    places: Mapping[str, str],
    codes: Mapping[str, QuantizedWeight],
    known: record.Record | None,
) -> Recipe:
    """What is stored decides; a head that shares its weight is rounded as the record has it."""
    paths = {places[path]: formats.NAMES[one.scheme] for path, one in codes.items()}
    tied = frozenset[str]().union(*ties(model))
    for claim in known.plan.claims if known is not None else ():
        if claim.fidelity == "lossy" and f"{claim.path}.weight" in tied:
            paths[claim.path] = "*." + claim.replacement.rpartition(".")[2]
    first = next(iter(paths.values()), STOCK)
    name = known.recipe if known is not None else "compressed-tensors"
    keep: Keep = "source" if known is not None else "none"
    overrides = (*paths.items(), ("*", STOCK))
    return Recipe(name, ((first,), ("*",)), keep=keep, overrides=overrides)


def _originals(
    model: nn.Module,
    places: Mapping[str, str],
    held: Checkpoint,
    known: record.Record | None,
) -> dict[str, Original]:
    """Where reversing finds each weight; nowhere for what has no source any more."""
    files = _source_files(held.folder, known)
    found = {}
    for path, place in places.items():
        name, slot = f"{path}.weight", f"{place}.weight"
        twin = placeholder(model.get_parameter(slot))
        digest = known.digests.get(name, "") if known is not None else ""
        file = files.get(name) if digest else None
        found[slot] = Original(name, None, file, digest, twin)
    return found


def _source_files(folder: Path, known: record.Record | None) -> dict[str, Path]:
    if known is None or known.hub:
        return {}
    try:
        source = read_checkpoint(find(os.path.normpath(folder.resolve() / known.source)))
    except OptimusError:
        return {}
    return {name: one.file for name, one in source.tensors.items()}
