"""Which operations on attention scores fit into one kernel call, and how.

Each rule takes what torch's function takes and returns the new ``Scores``, a tensor, or None
where the operation does not fit: then it is done on the real tensor.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from optimus.ops.axes import Axes, refined, spread, unexpanded
from optimus.ops.joins import summed
from optimus.ops.scores import MASKED, Derived, Scores, rule

# Added to any score this gives one number, so that a row whose keys are all masked comes out
# even, as it does where the fill takes the place of the scores.
SWALLOWS = -1e30


def _laid(scores: Scores, value: Tensor) -> Tensor | None:
    """``value``, which broadcasts against the scores, along their fine axes and ``[q, k]``."""
    value = unexpanded(value)
    shape = (1,) * (2 - value.ndim) + tuple(value.shape)
    axes = spread(shape[:-2], scores.lead, scores.fine)
    if axes is None or shape[-2] not in (1, scores.q) or shape[-1] not in (1, scores.k):
        return None
    return value.reshape(*axes, *shape[-2:])


@rule("add", "__add__", "__radd__", in_place=("add_", "iadd", "__iadd__"))
def _add(one: Any, other: Any, *, alpha: Any = 1) -> Scores | None:
    scores, value = (one, other) if isinstance(one, Scores) else (other, one)
    if scores.normal or alpha != 1:
        return None
    if isinstance(value, Scores):
        return summed(scores, value)
    if scores.gate is not None:
        return _gated(scores, value)
    new = scores.copied()
    if not isinstance(value, Tensor):
        # The same number everywhere: softmax does not see it.
        return new
    laid = _laid(scores, value)
    if laid is None:
        return None
    new.dtype = _promoted(scores, value)
    laid = laid if laid.is_floating_point() else laid.to(new.dtype)
    new.bias = laid if scores.bias is None else scores.bias + laid
    return new


def _gated(scores: Scores, value: Any) -> Scores | None:
    """``scores * mask + fill * (1 - mask)``: GPT's first way to mask.

    That the mask holds zeros and ones only, and the fill is low, takes a look at the data.
    """
    laid = _laid(scores, value) if isinstance(value, Tensor) else None
    if laid is None or scores.gate is None or torch.compiler.is_compiling():
        return None
    open_ = scores.gate == 1
    fits = torch.where(open_, laid == 0, (scores.gate == 0) & (laid <= MASKED))
    if not fits.all():
        return None
    new = scores.copied()
    new.gate = None
    fill = laid.clamp(max=max(SWALLOWS, torch.finfo(laid.dtype).min))
    new.bias = torch.where(open_, 0.0, fill)
    return new


@rule("sub", "subtract", "__sub__", in_place=("sub_", "isub", "__isub__"))
def _subtract(one: Any, other: Any, *, alpha: Any = 1) -> Scores | None:
    if not isinstance(one, Scores) or isinstance(other, Scores):
        return None
    if isinstance(other, Derived):
        return _without_peak(one, other)
    return _add(one, -other, alpha=alpha)


def _without_peak(scores: Scores, peak: Derived) -> Scores | None:
    if peak.of is not scores or scores.normal or not peak.is_peak:
        return None
    new = scores.copied()
    new.peaked = True
    return new


@rule("__rsub__")
def _subtract_reflected(other: Any, one: Any) -> Scores | None:
    # How torch.compile spells ``scores - tensor``: the method of the right operand.
    return _subtract(one, other)


def _promoted(scores: Scores, value: Tensor) -> torch.dtype:
    if value.ndim == 0 or not value.is_floating_point():
        return scores.dtype
    return torch.promote_types(scores.dtype, value.dtype)


@rule("mul", "multiply", "__mul__", "__rmul__", in_place=("mul_", "imul", "__imul__"))
def _multiply(one: Any, other: Any) -> Scores | None:
    scores, value = (one, other) if isinstance(one, Scores) else (other, one)
    if scores.normal or isinstance(value, Scores):
        return None
    new = scores.copied()
    if isinstance(value, Tensor):
        laid = _laid(scores, value)
        if laid is not None and laid.shape[-1] != 1 and scores.bias is None:
            new.gate = laid
            return new
        if laid is None or laid.shape[-1] != 1:
            return None
        new.factor = laid if scores.factor is None else scores.factor * laid
        new.dtype = _promoted(scores, value)
    else:
        laid = value
        new.scale = scores.scale * value
    new.bias = None if scores.bias is None else scores.bias * laid
    return new


@rule(
    "div",
    "divide",
    "true_divide",
    "truediv",
    "__truediv__",
    in_place=("div_", "itruediv", "__itruediv__"),
)
def _divide(one: Any, other: Any, *, rounding_mode: str | None = None) -> Scores | None:
    if not isinstance(one, Scores) or isinstance(other, Scores) or rounding_mode is not None:
        return None
    return _multiply(one, 1 / other)


@rule("__rdiv__")
def _divide_reflected(other: Any, one: Any) -> Scores | None:
    return _divide(one, other)


@rule("masked_fill", in_place=("masked_fill_",))
def _masked_fill(scores: Any, mask: Any, value: Any) -> Scores | None:
    value = _number(value)
    if not isinstance(scores, Scores) or value is None or isinstance(mask, Scores):
        return None
    laid = _laid(scores, mask)
    if laid is None or mask.dtype is not torch.bool:
        return None
    if scores.normal:
        return _zeroed(scores, laid) if value == 0 else None
    if value > MASKED:
        return None
    new = scores.copied()
    dtype = torch.float32 if scores.bias is None else scores.bias.dtype
    fill = max(min(value, SWALLOWS), torch.finfo(dtype).min)
    new.bias = torch.where(laid, fill, 0.0 if scores.bias is None else scores.bias)
    new.filled = laid if scores.filled is None else None
    return new


def _zeroed(scores: Scores, mask: Tensor) -> Scores | None:
    """Probabilities of masked keys set to zero: that changes rows with no other keys, and no more.

    Whether it is the mask of the scores takes a look at the data, so not while tracing.
    """
    if scores.filled is None or torch.compiler.is_compiling():
        return None
    if mask.shape != scores.filled.shape or not torch.equal(mask, scores.filled):
        return None
    new = scores.copied()
    new.zeroed = mask
    return new


def _number(value: Any) -> float | None:
    """A Python number; of a tensor of one, only where reading it costs no synchronisation."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.device.type != "cpu" or torch.compiler.is_compiling():
            return None
        return float(value.item())
    return None if isinstance(value, Scores) else value


@rule("where")
def _where(mask: Any, one: Any = None, other: Any = None) -> Scores | None:
    if isinstance(mask, Scores) or isinstance(one, Scores) == isinstance(other, Scores):
        return None
    if isinstance(one, Scores):
        return _masked_fill(one, ~mask, other)
    return _masked_fill(other, mask, one)


@rule("softmax")
def _softmax(scores: Any, dim: Any = None, dtype: Any = None, **_: Any) -> Scores | None:
    if dim not in (-1, scores.ndim - 1) or scores.normal:
        return None
    new: Scores = scores.copied()
    new.normal = True
    new.dtype = dtype or scores.dtype
    return new


@rule("dropout")
def _dropout(scores: Any, *args: Any, **kwargs: Any) -> Scores | None:
    given = dict(zip(("p", "training"), args, strict=False)) | kwargs
    drops = given.get("training", True) and given.get("p", 0.5)
    return scores.copied() if isinstance(scores, Scores) and not drops else None


@rule("contiguous", "clone")
def _same(scores: Any, *_: Any, **__: Any) -> Scores | None:
    return scores.copied() if isinstance(scores, Scores) else None


@rule("view", "reshape")
def _view(scores: Any, *shape: Any) -> Scores | None:
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if not isinstance(scores, Scores) or not isinstance(sizes, (tuple, list)):
        return None
    known = prod([size for size in sizes if size != -1])
    whole = [prod(scores.shape) // known if size == -1 else size for size in sizes]
    lead = tuple(whole[:-2])
    if whole[-2:] != [scores.q, scores.k] or not lead:
        return None
    return _seen(scores, lead)


def _seen(scores: Scores, lead: Axes) -> Scores | None:
    new = scores.copied()
    new.lead = lead
    if lead == scores.lead:
        return new
    fine = refined(scores.fine, lead)
    if fine is None:
        return None
    new.fine = fine
    for name in ("bias", "factor", "filled", "zeroed"):
        value = getattr(scores, name)
        if value is not None:
            axes = spread(value.shape[:-2], scores.fine, fine)
            if axes is None:
                return None
            setattr(new, name, value.reshape(*axes, *value.shape[-2:]))
    return new


@rule("to", "type", "type_as")
def _to(value: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs:
        return None
    dtype = getattr(args[0], "dtype", args[0])
    if not isinstance(dtype, torch.dtype):
        return None
    if not isinstance(value, Scores):
        return value.to(args[0].device, dtype)
    if getattr(args[0], "device", value.device) != value.device:
        return None
    new = value.copied()
    new.dtype = dtype
    return new


@rule("float")
def _float(scores: Any) -> Any:
    return _to(scores, torch.float32)


@rule("expand_as")
def _expand_as(value: Any, scores: Any) -> Any:
    return None if isinstance(value, Scores) else value.expand(scores.shape)


@rule("reshape_as", "view_as")
def _reshape_as(value: Any, scores: Any) -> Any:
    return None if isinstance(value, Scores) else value.reshape(scores.shape)


@rule("clamp", in_place=("clamp_",))
def _clamp(scores: Any, min: Any = None, max: Any = None) -> Scores | None:
    low = None if min is None else _number(min)
    if low is None or not isinstance(scores, Scores) or scores.normal:
        return None
    # Below a peak of zero, so far down softmax leaves nothing, and there is nothing above.
    done = low <= MASKED and (max is None or max >= 0) if scores.peaked else max is None
    lowest = MASKED if scores.peaked else torch.finfo(scores.dtype).min
    return scores.copied() if done and low <= lowest else None


@rule("max", "amax", "maximum")
def _maximum(scores: Any, *args: Any, **kwargs: Any) -> Scores | Derived | None:
    if args and isinstance(args[0], Tensor):
        return None if kwargs or len(args) > 1 else _clamp(scores, args[0])
    given = dict(zip(("dim", "keepdim"), args, strict=False)) | kwargs
    rows = given.get("dim") in (None, -1, (-1,), getattr(scores, "ndim", 0) - 1)
    fits = rows and isinstance(scores, Scores) and not scores.normal
    return Derived(scores, is_peak=True) if fits else None


@rule("transpose")
def _transpose(scores: Any, *axes: int) -> Scores | None:
    """The same products from the keys' side, as long as nothing was added."""
    plain = isinstance(scores, Scores) and scores.factor is scores.gate is scores.bias is None
    if not plain or scores.normal:
        return None
    if {axis % scores.ndim for axis in axes} != {scores.ndim - 2, scores.ndim - 1}:
        return None
    left, right = scores.right.transpose(-1, -2), scores.left.transpose(-1, -2)
    new = Scores(left, right, (), scores.shortest)
    if new.lead != scores.lead:
        return None
    new.scale, new.dtype, new.peaked = scores.scale, scores.dtype, scores.peaked
    return new


@rule("permute")
def _permute(scores: Any, *_: Any) -> Derived | None:
    """Weights in another order, for an answer that may be dropped."""
    return Derived(scores) if isinstance(scores, Scores) and scores.normal else None
