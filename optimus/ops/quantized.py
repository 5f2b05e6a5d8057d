"""Linear layers on a weight of 8 or 4 bits, with activations rounded to 8 bits on the way.

``y = (a ∘ x8) @ (s ∘ (q - zero))ᵀ + bias``: every group of k shares one weight scale a row of the
weight, and one activation scale a row of the input. Products and their sums over a group are exact
integers. A row of the input that holds NaN or infinity comes out as NaN throughout.

The packed weight: ``[n / 16][k / 4][16][4]`` unsigned bytes, the operand of ``vpdpbusd``; of 4 bits
two steps of k share a byte. One layout serves one row and many.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from optimus.core.errors import Refusal
from optimus.ops import native
from optimus.ops.held import hold
from optimus.ops.rounding import Rounded, importance, relative, rounded, zero_code

__all__ = [
    "INT4",
    "INT8",
    "INT8_DYNAMIC",
    "QuantizedWeight",
    "Scheme",
    "importance",
    "unfit",
]

TILE = 16
STEP = 32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Sums of k products of 8 bits that fit an int32: 2³¹ / (128 · 127).
LONGEST = 131_072
# Beyond it the range of a group may not be a number of fp32.
LARGEST = 1e38
# Numbers of a weight that are made dense at once where no compiled kernel is.
DENSE = 1 << 22


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a weight is rounded.

    bits: 8 or 4. group: how many numbers of k share a scale; 0 is the whole row.
    symmetric: codes around zero; otherwise each group has a minimum of its own.
    rows: activations share one scale a row instead of one a group.
    """

    bits: int
    group: int = 32
    symmetric: bool = True
    rows: bool = False


INT8 = Scheme(8, 32)
INT8_DYNAMIC = Scheme(8, 0, rows=True)
INT4 = Scheme(4, 32)


def unfit(weight: Tensor, scheme: Scheme) -> Refusal | None:
    """Why this weight cannot be rounded so; None where it can."""
    if weight.ndim != 2:
        return Refusal(f"weight has {weight.ndim} dimensions")
    if weight.dtype not in DTYPES:
        return Refusal(f"weight is {str(weight.dtype).removeprefix('torch.')}")
    if weight.device.type != "cpu":
        return Refusal(f"weight is on {weight.device.type}")
    if weight.numel() == 0:
        return Refusal("weight is empty")
    return _unfit_scheme(weight.shape[1], scheme) or _unfit_numbers(weight)


def _unfit_scheme(width: int, scheme: Scheme) -> Refusal | None:
    if scheme.bits not in (4, 8):
        return Refusal(f"{scheme.bits} bits: only 4 and 8 have kernels")
    if scheme.group and scheme.group % STEP:
        return Refusal(f"groups of {scheme.group}: a multiple of {STEP} is needed")
    if scheme.group and width % scheme.group:
        return Refusal(f"groups of {scheme.group} do not divide {width} input features")
    if width > LONGEST:
        return Refusal(f"{width} input features: sums over more than {LONGEST:,} overflow")
    return None


def _unfit_numbers(weight: Tensor) -> Refusal | None:
    # One pass without a temporary; NaN is the least and the largest of its company.
    least, most = torch.aminmax(weight.detach())
    if least >= -LARGEST and most <= LARGEST:
        return None
    return Refusal("weight holds NaN, infinity or numbers beyond 1e38")


class QuantizedWeight:
    """One weight ``[out, in]`` as codes and scales. Never written to; copies share the codes."""

    def __init__(self, weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> None:
        refusal = unfit(weight, scheme)
        if refusal is not None:
            raise ValueError(
                f"a weight {tuple(weight.shape)} cannot be rounded by {scheme}: {refusal.reason}. "
                "Ask optimus.ops.quantized.unfit first."
            )
        # Grad mode off, inference mode off: the codes must be usable in either.
        with torch.inference_mode(mode=False), torch.no_grad():
            worth = None if importance is None else relative(importance)
            route = _rounded_by_torch if native.available() else _rounded_natively
            tiles = route(weight.detach(), scheme, worth)
            self._set(tiles, weight.shape, weight.dtype, scheme)

    def _set(
        self, tiles: Rounded, shape: Sequence[int], dtype: torch.dtype, scheme: Scheme
    ) -> None:
        self.out_features, self.in_features = shape
        self.dtype, self.scheme = dtype, scheme
        self.tiles = tiles
        usable = native.available() is None
        self._native = _reference(tiles, shape, scheme) if usable else None
        self.handle = hold(self)

    @property
    def address(self) -> int | None:
        """Where the compiled kernels find it; None where there are none."""
        return None if self._native is None else ctypes.addressof(self._native._obj)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and minima."""
        return sum(part.nbytes for part in self.tiles if part is not None)

    @classmethod
    def of(cls, plain: Rounded, dtype: torch.dtype, scheme: Scheme) -> QuantizedWeight:
        """The weight that is already rounded: codes ``[out, in]``, scales ``[out, groups]``."""
        found: QuantizedWeight = _restore(
            _tiled(plain, scheme), plain.codes.shape, dtype, scheme, cls
        )
        return found

    def plain(self) -> Rounded:
        """Codes ``[out, in]`` and scales ``[out, groups]``, newly allocated; ``of`` undoes it."""
        return _untiled(self.tiles, self.out_features, self.in_features, self.scheme)

    def matmul(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """``input [..., in] @ weightᵀ + bias``, in the input's dtype, whatever the weight's was.

        Not differentiable; see ``held_linear``.
        """
        if input.dtype not in DTYPES or input.shape[-1] != self.in_features:
            raise ValueError(
                f"a quantized linear layer takes [..., {self.in_features}] of float32, bfloat16 or "
                f"float16, and was given {tuple(input.shape)} of {input.dtype}"
            )
        if self._native is not None:
            return native.linear(self._native, self.out_features, input, bias)
        return self._plain(input, bias)

    def _plain(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """The product with torch's own operators: the same rounding, much slower."""
        with torch.no_grad():
            x = self._rounded_input(input.detach())
            parts = [linear(x, rows) for rows in self._dense_slices()]
            out = torch.cat(parts, -1)
            if bias is not None:
                out += bias.float()
            return out.view(*input.shape[:-1], self.out_features).to(input.dtype)

    def _rounded_input(self, input: Tensor) -> Tensor:
        width = self.in_features
        group = width if self.scheme.rows or not self.scheme.group else self.scheme.group
        x = input.reshape(-1, width).float().view(-1, width // group, group)
        largest = x.abs().amax(-1, keepdim=True)
        # Below this the inverse of the scale is beyond fp32.
        scale = torch.where(largest > TINY, largest / 127, 0.0)
        scale = torch.where(largest.isfinite(), scale, torch.nan)
        # A quotient of two tensors: torch takes a number over a tensor by way of the reciprocal.
        inverse = torch.where(scale > 0, torch.full_like(largest, 127) / largest, 0.0)
        codes = torch.where(scale.isnan(), 0.0, x * inverse).round()
        return (codes * scale).flatten(1)

    def _dense_slices(self) -> list[Tensor]:
        """fp32 rows of the weight, a few at a time."""
        codes, scale, minimum = self.tiles
        step = max(1, DENSE // (TILE * self.in_features))
        slices = []
        for start in range(0, codes.shape[0], step):
            part = slice(start, start + step)
            left = min(step * TILE, self.out_features - start * TILE)
            tiles = Rounded(codes[part], scale[part], None if minimum is None else minimum[part])
            plain = _untiled(tiles, left, self.in_features, self.scheme)
            slices.append(_dequantized(plain, self.scheme))
        return slices

    def dense(self) -> Tensor:
        """The rounded weight ``[out, in]`` in its own dtype, newly allocated."""
        with torch.inference_mode(mode=False), torch.no_grad():
            return torch.cat([rows.to(self.dtype) for rows in self._dense_slices()])

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        shape = (self.out_features, self.in_features)
        twin: Self = _restore(self.tiles, shape, self.dtype, self.scheme, type(self))
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        shape = (self.out_features, self.in_features)
        return _restore, (self.tiles, shape, self.dtype, self.scheme, type(self))


# The smallest activation for which 127 / x is finite in fp32.
TINY = 127 / torch.finfo(torch.float32).max


def _restore(
    tiles: Rounded, shape: Sequence[int], dtype: torch.dtype, scheme: Scheme, cls: type[Any]
) -> Any:
    weight: Any = object.__new__(cls)
    with torch.inference_mode(mode=False):
        weight._set(tiles, shape, dtype, scheme)
    return weight


def _reference(tiles: Rounded, shape: Sequence[int], scheme: Scheme) -> Any:
    rows, width = shape
    codes, scale, minimum = tiles
    how = {"group": scheme.group, "bits": scheme.bits, "rows": int(scheme.rows)}
    return native.weight(codes, scale, minimum, (rows, width), **how)


def _rounded_natively(weight: Tensor, scheme: Scheme, worth: Tensor | None) -> Rounded:
    rows, width = weight.shape
    tiles, groups = -(-rows // TILE), width // (scheme.group or width)
    steps = -(-width // STEP) * scheme.bits
    scale = torch.zeros(tiles, groups, TILE, dtype=torch.bfloat16)
    made = Rounded(
        torch.zeros(tiles, steps, TILE, 4, dtype=torch.uint8),
        scale,
        None if scheme.symmetric else torch.zeros_like(scale),
    )
    worth = (torch.ones(1) if worth is None else worth).expand(width).contiguous()
    native.round_into(_reference(made, weight.shape, scheme), weight, worth)
    return made


def _rounded_by_torch(weight: Tensor, scheme: Scheme, worth: Tensor | None) -> Rounded:
    group = scheme.group or weight.shape[1]
    plain = rounded(weight, scheme.bits, group, symmetric=scheme.symmetric, worth=worth)
    return _tiled(plain, scheme)


def _tiled(plain: Rounded, scheme: Scheme) -> Rounded:
    """Into tiles of 16 rows by 4 numbers of k, padded with zeros."""
    rows, width = plain.codes.shape
    missing = -rows % TILE
    codes = pad(plain.codes, (0, -width % STEP, 0, missing))
    tiles = codes.view(-1, TILE, codes.shape[1] // 4, 4).transpose(1, 2)
    if scheme.bits == 4:
        tiles = tiles[:, ::2] | (tiles[:, 1::2] << 4)
    return Rounded(
        tiles.contiguous(),
        _tiled_scale(plain.scale, missing),
        None if plain.minimum is None else _tiled_scale(plain.minimum, missing),
    )


def _tiled_scale(scale: Tensor, missing: int) -> Tensor:
    padded = pad(scale, (0, 0, 0, missing))
    return padded.view(-1, TILE, padded.shape[1]).transpose(1, 2).contiguous()


def _untiled(tiles: Rounded, rows: int, width: int, scheme: Scheme) -> Rounded:
    codes = tiles.codes
    if scheme.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), 2).flatten(1, 2)
    codes = codes.transpose(1, 2).reshape(codes.shape[0] * TILE, -1)[:rows, :width]
    scale, minimum = (
        None if one is None else one.transpose(1, 2).reshape(codes_rows(one), -1)[:rows]
        for one in tiles[1:]
    )
    assert scale is not None
    return Rounded(codes, scale, minimum)


def codes_rows(scale: Tensor) -> int:
    """Rows of the weight in a tiled ``scale``, with those that pad it."""
    return scale.shape[0] * TILE


def _dequantized(plain: Rounded, scheme: Scheme) -> Tensor:
    codes, scale, minimum = plain
    steps = codes.float().view(*scale.shape, -1)
    if minimum is None:
        steps -= zero_code(scheme.bits)
        return (steps * scale.float().unsqueeze(-1)).flatten(1)
    return (steps * scale.float().unsqueeze(-1) + minimum.float().unsqueeze(-1)).flatten(1)
