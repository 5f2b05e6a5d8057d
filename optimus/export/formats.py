"""Rounded weights in the ``compressed-tensors`` format, which transformers and vLLM load.

Codes and scales are those of ``QuantizedWeight``, so that what is loaded answers as what was
transformed. The library checks the config and unpacks the codes; it is the extra ``formats``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from optimus.core.errors import BackendUnavailableError
from optimus.export.layout import FolderError, Shape
from optimus.ops.quantized import INT4, INT8, INT8_DYNAMIC, QuantizedWeight, Scheme
from optimus.ops.rounding import Rounded, zero_code

PACKED, PLAIN = "pack-quantized", "int-quantized"
# What each scheme is called in a recipe's patterns.
NAMES = {
    INT8: "*.int8",
    INT8_DYNAMIC: "*.int8-dynamic",
    INT4: "*.int4",
    Scheme(4, 64): "*.int4-g64",
    Scheme(4, 128): "*.int4-g128",
}


def library(part: str) -> Any:
    """A module of compressed-tensors; the error names the extra."""
    try:
        return importlib.import_module(f"compressed_tensors.{part}")
    except ImportError as error:
        raise BackendUnavailableError(
            "rounded weights are stored by compressed-tensors, which is not installed: "
            "pip install 'optimus[formats]'."
        ) from error


def outcomes(weight: Shape, scheme: Scheme) -> tuple[Shape, ...]:
    """The tensors that stand for one weight ``[out, in]``."""
    stem, (rows, width) = weight.name.removesuffix("weight"), weight.shape
    groups = width // (scheme.group or width)
    scale = Shape(f"{stem}weight_scale", torch.bfloat16, (rows, groups))
    if scheme.rows:
        return Shape(weight.name, torch.int8, weight.shape), scale
    words = -(-width * scheme.bits // 32)
    codes = Shape(f"{stem}weight_packed", torch.int32, (rows, words))
    return codes, Shape(f"{stem}weight_shape", torch.int64, (2,)), scale


def written(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """Codes as they are stored, and scales ``[out, groups]``."""
    plain, scheme = weight.plain(), weight.scheme
    if scheme.rows:
        return (plain.codes.to(torch.int16) - zero_code(scheme.bits)).to(torch.int8), plain.scale
    return _packed(plain.codes, scheme.bits), plain.scale


def _packed(codes: Tensor, bits: int) -> Tensor:
    """The words of the library's ``pack_to_int32``, without its scatter.

    That takes as long as the rounding, and three times as long for 8 bits. Groups are multiples
    of 32, so no word is shared by two rows; the first code is the lowest bits.
    """
    if bits == 4:
        codes = codes[:, ::2] | (codes[:, 1::2] << 4)
    return codes.contiguous().view(torch.int32)


def taken_in(stem: str, held: Mapping[str, Tensor], dtype: torch.dtype) -> QuantizedWeight:
    """One weight from its tensors, by their last names, without making it dense.

    ``FolderError`` where the layout has no kernel, or the tensors do not fit each other.
    """
    try:
        return _taken_in(stem, held, dtype)
    except FolderError:
        raise
    except (KeyError, IndexError, ValueError, RuntimeError) as error:
        raise FolderError(f"{stem}: its codes and scales do not fit each other: {error}") from error


def _taken_in(stem: str, held: Mapping[str, Tensor], dtype: torch.dtype) -> QuantizedWeight:
    scheme = _scheme(stem, held)
    scale = held["weight_scale"]
    narrow = scale.to(torch.bfloat16)
    if not torch.equal(narrow.to(scale.dtype), scale):
        raise FolderError(f"{stem}: its scales are finer than bfloat16, which the kernels take.")
    codes = held.get("weight")
    if codes is None:
        shape = torch.Size(held["weight_shape"].tolist())
        codes = library("compressors").unpack_from_int32(held["weight_packed"], scheme.bits, shape)
    unsigned = (codes.to(torch.int16) + zero_code(scheme.bits)).to(torch.uint8)
    return QuantizedWeight.of(Rounded(unsigned, narrow, None), dtype, scheme)


def _refuse_others(stem: str, held: Mapping[str, Tensor]) -> None:
    known = {"weight", "weight_packed", "weight_scale", "weight_shape"}
    if other := sorted(set(held) - known):
        raise FolderError(
            f"{stem}: {other[0]} (zero points, orders and static activations) has no kernel here. "
            "Load the folder with transformers."
        )


def _scheme(stem: str, held: Mapping[str, Tensor]) -> Scheme:
    _refuse_others(stem, held)
    scale = held["weight_scale"]
    if "weight" in held:
        rows, width = held["weight"].shape
        bits, dtype = 8, held["weight"].dtype
    else:
        rows, width = held["weight_shape"].tolist()
        words = held["weight_packed"].shape[1]
        bits, dtype = next((b for b in (4, 8) if -(-width * b // 32) == words), 0), torch.int8
    groups = scale.shape[1] if scale.ndim == 2 and scale.shape[0] == rows else 0
    # Codes that are not packed are those of formats that round activations by rows, too.
    rows_alone = groups == 1 and "weight" in held
    group = width // groups if groups and width % groups == 0 else -1
    scheme = Scheme(bits, 0, rows=True) if rows_alone else Scheme(bits, group)
    if scheme not in NAMES or dtype != torch.int8:
        raise FolderError(
            f"{stem}: {bits or 'an odd number of'} bits, {groups} scales a row of {width}: no "
            "kernel here. Load the folder with transformers."
        )
    return scheme


def refuse_activations(config: Mapping[str, Any]) -> None:
    """``FolderError`` where a checkpoint wants its activations rounded as no kernel does it."""
    groups = config.get("config_groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        asked = group.get("input_activations") if isinstance(group, dict) else None
        found = asked if isinstance(asked, dict) else {}
        if asked and any(found.get(key) != value for key, value in _activations().items()):
            raise FolderError(
                f"{name}: input_activations are not int8 of a row, found as they come. Load the "
                "folder with transformers."
            )


def config(rounded: Mapping[str, Scheme], linears: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a model; ``linears`` are the paths of all linear layers."""
    groups = {f"group_{n}": one for n, one in enumerate(_groups(rounded))}
    formats = {one["format"] for one in groups.values()}
    made = library("quantization").QuantizationConfig.model_validate(
        {
            "config_groups": groups,
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "ignore": [path for path in linears if path not in rounded],
        }
    )
    found: dict[str, Any] = made.model_dump(mode="json", exclude_none=True)
    return found


def _groups(rounded: Mapping[str, Scheme]) -> Iterator[dict[str, Any]]:
    schemes = list(dict.fromkeys(rounded.values()))
    for scheme in schemes:
        mine = [path for path, one in rounded.items() if one == scheme]
        # By class where all are alike: every reader knows that.
        yield {
            "targets": ["Linear"] if len(schemes) == 1 else mine,
            "weights": _weights(scheme),
            "input_activations": _activations() if scheme.rows else None,
            "format": PLAIN if scheme.rows else PACKED,
        }


def _weights(scheme: Scheme) -> dict[str, Any]:
    group = {"strategy": "group", "group_size": scheme.group}
    how = group if scheme.group else {"strategy": "channel"}
    return {"num_bits": scheme.bits, "type": "int", "symmetric": True, "dynamic": False, **how}


def _activations() -> dict[str, Any]:
    return {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
