"""Rounding a weight to 8 or 4 bits: codes, and the scale (and minimum) of each group of k.

A number is ``scale * (code - zero)`` with ``zero`` 128 or 8 when symmetric, ``scale * code +
minimum`` otherwise. Scales and minima are bf16 (full range, half the bytes of fp32) and the codes
are chosen for the scale as stored, so that its own rounding costs nothing.

``native/rounding.c`` does the same in a tenth of the time and gives the same bits, so every sum
here is in the order in which it adds.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# The scales tried for a group, as shares of the one that just reaches its largest number.
SHARES = (0.65, 0.72, 0.78, 0.84, 0.89, 0.93, 0.97, 1.0, 1.04)
# Numbers rounded at once: the temporaries of a slice stay in the second-level cache; elsewhere the
# calls are few enough for their launches not to count.
SLICE, WIDE_SLICE = 1 << 16, 1 << 24
# A sum over a group is one of so many partial sums, each of every so many numbers.
CHAINS = 8


class Rounded(NamedTuple):
    """``codes [n, k]`` uint8; ``scale`` and ``minimum`` ``[n, groups]`` bf16."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None


def zero_code(bits: int) -> int:
    """The code of 0.0 in a symmetric weight."""
    return 1 << (bits - 1)


def importance(inputs: Tensor) -> Tensor:
    """``[in]``: the mean square of each feature over calibration activations ``[..., in]``.

    The error of a product is the error of the weight times the activation, so a weight that meets
    large activations is worth more (the idea of llama.cpp's imatrix and of AWQ).
    """
    return inputs.detach().flatten(0, -2).float().square().mean(0)


def relative(importance: Tensor) -> Tensor:
    """Weights of the error, positive everywhere: a feature never seen still counts a little."""
    worth = importance.detach().float()
    mean = worth.mean()
    return (worth / mean).clamp_min(1e-4) if mean > 0 else torch.ones_like(worth)


def rounded(
    weight: Tensor, bits: int, group: int, *, symmetric: bool, worth: Tensor | None = None
) -> Rounded:
    """Round ``weight [n, k]``, a slice of rows at a time; ``group`` divides k.

    ``worth [k]``: how much the error of each input feature counts.
    """
    rows, width = weight.shape
    step = max(1, (SLICE if weight.device.type == "cpu" else WIDE_SLICE) // width)
    groups = width // group
    worth = None if worth is None else worth.view(groups, group)
    codes = torch.empty(rows, width, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(rows, groups, dtype=torch.bfloat16, device=weight.device)
    minimum = None if symmetric else torch.empty_like(scale)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        block = weight[part].float().view(-1, groups, group)
        if symmetric:
            found, scale[part] = _symmetric(block, bits, worth)
        else:
            assert minimum is not None
            found, scale[part], minimum[part] = _asymmetric(block, bits, worth)
        codes[part] = found.view(-1, width)
    return Rounded(codes, scale, minimum)


def _sum(x: Tensor) -> Tensor:
    """Over the last dimension, in an order that is defined: torch's depends on the processor."""
    padded = pad(x, (0, -x.shape[-1] % CHAINS))
    chains = padded.view(*padded.shape[:-1], -1, CHAINS)
    return functools.reduce(torch.add, functools.reduce(torch.add, chains.unbind(-2)).unbind(-1))


def _stored(scale: Tensor) -> Tensor:
    return scale.to(torch.bfloat16).float()


def _raised(scale: Tensor) -> Tensor:
    """To bf16, away from zero: what just fitted still fits."""
    bits = scale.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & -0x10000).view(torch.float32)


def _inverse(scale: Tensor) -> Tensor:
    """``1 / scale``, and 0 where that is nothing or beyond fp32."""
    inverse = scale.reciprocal()
    return torch.where(inverse.isfinite(), inverse, 0.0)


def _symmetric(block: Tensor, bits: int, worth: Tensor | None) -> tuple[Tensor, Tensor]:
    zero = zero_code(bits)
    if bits == 8:
        scale = _raised(block.abs().amax(-1) / (zero - 1))
    else:
        scale = _best_scale(block, zero, worth)
    scale = torch.where(scale.reciprocal().isfinite(), scale, 0.0)
    steps = (block * _inverse(scale).unsqueeze(-1)).round_().clamp_(-zero, zero - 1)
    return steps.add_(zero).to(torch.uint8), scale.to(torch.bfloat16)


def _best_scale(block: Tensor, zero: int, worth: Tensor | None) -> Tensor:
    """The scale of least squared error for each group; negative where its sign helps.

    Codes reach one step further below than above, so the largest number of a group goes to the
    longer side. For each candidate the codes are found, and then the scale that fits them best. The
    one that reaches all stays where the squares are beyond fp32, or nothing.
    """
    high, low = block.amax(-1), block.amin(-1)
    extreme = torch.where(high > -low, high, low)
    weighted = block if worth is None else block * worth
    best = torch.zeros_like(extreme)
    scale = extreme / -zero
    for share in SHARES:
        inverse = _inverse(extreme * (-share / zero)).unsqueeze(-1)
        steps = (block * inverse).round_().clamp_(-zero, zero - 1)
        cross = _sum(weighted * steps)
        square = _sum(steps * steps if worth is None else steps * steps * worth)
        fit = torch.where(square > 0, cross / square, 0.0)
        gain = cross * fit
        better = (gain > best) & (gain < torch.inf)
        best = torch.where(better, gain, best)
        scale = torch.where(better, fit, scale)
    return _stored(scale)


def _asymmetric(block: Tensor, bits: int, worth: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    top = (1 << bits) - 1
    high, low = block.amax(-1), block.amin(-1)
    scale, minimum = (high - low) / top, low
    if bits == 4:
        scale, minimum = _best_line(block, scale, minimum, worth)
    minimum = _stored(minimum)
    scale = _stored(scale) if bits == 4 else _raised((high - minimum).clamp_min(0) / top)
    scale = torch.where(scale.reciprocal().isfinite(), scale, 0.0)
    steps = (block - minimum.unsqueeze(-1)) * _inverse(scale).unsqueeze(-1)
    codes = steps.round_().clamp_(0, top).to(torch.uint8)
    return codes, scale.to(torch.bfloat16), minimum.to(torch.bfloat16)


def _best_line(
    block: Tensor, scale: Tensor, minimum: Tensor, worth: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scale and minimum of least squared error: candidates, then a weighted line through each."""
    weights = torch.ones_like(block[:1]) if worth is None else worth
    total = _sum(weights)
    mean = _sum(block * weights) / total
    centred = block - mean.unsqueeze(-1)
    weighted = centred * weights
    middle = minimum + scale * 7.5
    best = torch.zeros_like(scale)
    scale_found, minimum_found = scale, minimum
    for share in SHARES:
        inverse = _inverse(scale * share)
        start = middle - scale * (share * 7.5)
        steps = ((block - start.unsqueeze(-1)) * inverse.unsqueeze(-1)).round_().clamp_(0, 15)
        centre = _sum(steps * weights) / total
        cross = _sum(weighted * steps)
        square = _sum(steps * steps * weights) - centre * centre * total
        slope = torch.where(square > 0, cross / square, 0.0)
        gain = cross * slope
        better = (gain > best) & (gain < torch.inf)
        best = torch.where(better, gain, best)
        scale_found = torch.where(better, slope, scale_found)
        minimum_found = torch.where(better, mean - slope * centre, minimum_found)
    return scale_found, minimum_found
