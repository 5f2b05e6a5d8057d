"""What becomes of each tensor of a checkpoint: decided from headers and the config alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from optimus.core import backend, planner
from optimus.core.paths import ties
from optimus.core.planner import Plan
from optimus.core.registry import Registry
from optimus.core.replacement import Replacement
from optimus.export import formats
from optimus.export.folder import Checkpoint
from optimus.export.layout import FolderError, Shape, Stored
from optimus.measure import load
from optimus.ops.quantized import Scheme

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLOATS = frozenset((*DTYPES.values(), torch.float64))
# What a folder may be made for on any machine: it is where it is loaded that has to have it.
ABILITIES = frozenset({"int8-products", "native-bf16"})
# What a config has one module of for each: no more than the weights hold tensors, or these many.
COUNTS = re.compile(r"^(n|num)_\w*(layer|block|expert|stage|label)s?$|^depths?$")
MOST, MOST_LABELS = 1024, 1_000_000
DEEPEST = 8


@dataclass(frozen=True, slots=True)
class Step:
    """One tensor of the source, and the tensors that are written for it.

    ``scheme``: it is rounded so; otherwise it is cast to the dtype of its only outcome.
    """

    source: Stored
    outcomes: tuple[Shape, ...]
    scheme: Scheme | None = None


@dataclass(frozen=True, slots=True)
class Outline:
    """All steps, in the order of the source, and the plan that they come from.

    ``rounded``: the scheme of each rounded module, by its path in the model.
    """

    steps: tuple[Step, ...]
    plan: Plan
    rounded: Mapping[str, Scheme]
    dtype: torch.dtype


def outline(source: Checkpoint, recipe: str, dtype: str | None) -> Outline:
    """Check the checkpoint against its config, plan the recipe on meta, and lay out the result."""
    _refuse_quantized(source)
    model = skeleton(source)
    keys = match(model, source)
    made = planner.plan(model, recipe, backend=_able())
    wanted = DTYPES[dtype] if dtype else None
    if "cpu.bf16" in made.passes:
        if wanted not in (None, torch.bfloat16):
            raise FolderError(f"recipe {recipe!r} writes bfloat16, and --dtype {dtype} asks other.")
        wanted = torch.bfloat16
    schemes = _schemes(model, made)
    if made.fidelity.value == "lossy" and not (schemes or made.passes):
        raise FolderError(
            f"{source.folder}: nothing that recipe {recipe!r} rounds has a format that others "
            "read: only nn.Linear with a weight of its own has."
        )
    wide = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    steps = [_step(one, keys, schemes, wanted, wide) for one in source.tensors.values()]
    return Outline(tuple(steps), made, schemes, wanted or usual_dtype(source))


def _able() -> backend.Backend:
    host = backend.host()
    return replace(host, features=host.features | ABILITIES)


def _refuse_quantized(source: Checkpoint) -> None:
    found = source.config.get("quantization_config")
    if found is not None:
        method = found.get("quant_method") if isinstance(found, dict) else found
        raise FolderError(
            f"{source.folder} is already quantized ({str(method)[:40]}), and rounding twice loses "
            "twice. Convert the checkpoint that it was made of; optimus.load reads "
            "compressed-tensors as they are."
        )


def usual_dtype(source: Checkpoint) -> torch.dtype:
    """The floating dtype with the most numbers; fp32 where there is none."""
    sizes: dict[torch.dtype, int] = {}
    for one in source.tensors.values():
        if one.dtype in FLOATS:
            sizes[one.dtype] = sizes.get(one.dtype, 0) + one.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


def skeleton(source: Checkpoint) -> nn.Module:
    """The model of the config on meta; ``FolderError`` where transformers cannot make it."""
    _refuse_bombs(source.config, len(source.tensors))
    try:
        config = load.read_config(str(source.folder))
        config.dtype = usual_dtype(source)
        return load.skeleton(config)
    except load.LoadError:
        raise
    except Exception as error:  # a config is data, and may break any code
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise FolderError(f"{source.folder}: its config describes no model: {reason}") from error


def _refuse_bombs(config: Any, tensors: int, depth: int = 0) -> None:
    """A config of a billion layers is built one by one, on meta, too."""
    if depth > DEEPEST:
        raise FolderError("config.json nests deeper than any config does.")
    for key, value in config.items() if isinstance(config, dict) else ():
        counts = value if isinstance(value, list) else [value]
        largest = max((n for n in counts if type(n) is int), default=0)
        bound = MOST_LABELS if key == "num_labels" else max(tensors, MOST)
        if largest > bound and COUNTS.search(key):
            raise FolderError(
                f"config.json asks for {key} = {largest:,}"[:120]
                + f", and the weights hold {tensors:,} tensors."
            )
        _refuse_bombs(value, tensors, depth + 1)


def match(model: nn.Module, source: Checkpoint) -> dict[str, str]:
    """The model's name of each tensor that it knows; ``FolderError`` where shapes differ.

    A checkpoint may be of the model with a head or without: its names have the prefix of the base
    model, or lack it.
    """
    known = model.state_dict()
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    keys: dict[str, str] = {}
    for key, one in source.tensors.items():
        names = (key, prefix + key, key.removeprefix(prefix))
        name = next((name for name in names if name in known), None)
        if name is None:
            continue
        if tuple(known[name].shape) != one.shape:
            raise FolderError(
                f"{source.folder}: {key} is {list(one.shape)} in the weights and "
                f"{list(known[name].shape)} by the config."
            )
        keys[key] = name
    _refuse_lack(model, source, set(keys.values()))
    return keys


def _refuse_lack(model: nn.Module, source: Checkpoint, found: set[str]) -> None:
    if _is_renamed(model):
        return
    shared = {name: group for group in ties(model) for name in group}
    names = {name for name, _ in model.named_parameters()}
    lost = [n for n in sorted(names - found) if not found & shared.get(n, frozenset())]
    if lost:
        raise FolderError(
            f"{source.folder}: the weights lack {lost[0]} ({len(lost)} missing of {len(names)})."
        )


def _is_renamed(model: nn.Module) -> bool:
    """Whether transformers stores this type of model under other names than it runs it."""
    from transformers import conversion_mapping

    kind = getattr(getattr(model, "config", None), "model_type", "")
    find: Any = conversion_mapping.get_checkpoint_conversion_mapping
    return bool(find(kind))


def _schemes(model: nn.Module, made: Plan) -> dict[str, Scheme]:
    """Which linear layers are rounded, and how; a shared weight stays for its other owner."""
    known, tied = Registry.installed(), frozenset[str]().union(*ties(model))
    found: dict[str, Scheme] = {}
    for claim in made.claims:
        scheme = getattr(cast(Replacement, known[claim.replacement]).mixin, "scheme", None)
        module = model.get_submodule(claim.path)
        shared = f"{claim.path}.weight" in tied
        if scheme is not None and type(module) is nn.Linear and not shared:
            found[claim.path] = scheme
    return found


def _step(
    one: Stored,
    keys: Mapping[str, str],
    schemes: Mapping[str, Scheme],
    wanted: torch.dtype | None,
    wide: tuple[str, ...],
) -> Step:
    name = keys.get(one.name, one.name)
    scheme = schemes.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
    if scheme is not None:
        return Step(one, formats.outcomes(one, scheme), scheme)
    kept = one.dtype not in FLOATS or any(part in name.split(".") for part in wide)
    dtype = one.dtype if kept or wanted is None else wanted
    return Step(one, (Shape(one.name, dtype, one.shape),))


def shards(steps: tuple[Step, ...], size: int | None) -> Iterator[list[Step]]:
    """Steps that share a file: as the source has them, or up to ``size`` bytes each."""
    part: list[Step] = []
    filled = 0
    for step in steps:
        nbytes = sum(one.nbytes for one in step.outcomes)
        new_file = bool(part) and step.source.file != part[-1].source.file
        if part and (filled + nbytes > size if size else new_file):
            yield part
            part, filled = [], 0
        part.append(step)
        filled += nbytes
    if part:
        yield part
