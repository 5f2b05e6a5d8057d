"""Running a hand-written attention so that its products with scores become one kernel call."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import optimus.ops.rules  # noqa: F401  (fills the table that ``respond`` reads)
from optimus.ops.attention import attention
from optimus.ops.axes import Axes, broadcast, halves
from optimus.ops.einsum import as_product
from optimus.ops.joins import concatenated
from optimus.ops.kernels import spoils_gradients, widened
from optimus.ops.scores import Derived, Scores, first, real, respond

PRODUCTS = frozenset({"matmul", "__matmul__", "bmm"})


class Deferred(TorchFunctionMode):
    """While active, products of two batches of matrices are ``Scores``.

    ``shortest``: the number of keys from which on a call of the fused kernel pays; shorter ones
    take the model's own way. Attention weights are taken to be read by nobody.
    """

    def __init__(self, shortest: int = 1) -> None:
        super().__init__()
        self.shortest = shortest

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name in PRODUCTS and len(args) == 2 and not kwargs:
            return self.product(func, *args)
        if name == "baddbmm":
            return self.sum_of_product(func, args, kwargs)
        if name == "einsum":
            return self.contraction(func, args, kwargs)
        if name == "scaled_dot_product_attention":
            return called(func, *args, **kwargs)
        if name == "multi_head_attention_forward":
            # torch takes its own fused kernel where the weights are not asked for.
            return func(*args, **{**kwargs, "need_weights": False})
        for one in args:
            kind = type(one)
            if kind is Scores:
                return respond(func, args, kwargs)
            if name == "cat" and first(one) is not None:
                return self.joined(func, *args, **kwargs)
            if kind is list or kind is tuple or kind is Derived:
                return func(*real(args), **real(kwargs))
        return func(*args, **kwargs)

    def product(self, func: Any, left: Any, right: Any) -> Any:
        """``left @ right``: the end of an attention, or perhaps the beginning of one."""
        if _is_swapped(func, left, right):
            left, right = right, left
        if isinstance(left, Scores) and isinstance(right, Tensor):
            found = attended(left, right)
            return func(left.dense(), right) if found is None else found
        if isinstance(left, Scores) or isinstance(right, Scores) or not _could_be(left, right):
            return func(real(left), real(right))
        return Scores(left, right, ((func, (left, right), {}),), self.shortest)

    def sum_of_product(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """``beta * bias + alpha * left @ right``, of three-dimensional batches."""
        given = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | kwargs
        bias, left, right = given["input"], given["batch1"], given["batch2"]
        if first((bias, left, right)) is not None or "out" in kwargs:
            return func(*real(args), **real(kwargs))
        scores = Scores(left, right, ((torch.bmm, (left, right), {}),), self.shortest)
        made = scores * given.get("alpha", 1)
        beta = given.get("beta", 1)
        if beta and not _is_zero(bias):
            made = made + (bias if beta == 1 else bias * beta)
        if not isinstance(made, Scores):
            return func(*args, **kwargs)
        made.steps = ((func, args, kwargs),)
        return made

    def joined(self, func: Any, parts: Any, dim: int = 0) -> Any:
        """Blocks of scores put side by side or above one another."""
        made = concatenated(func, parts, dim)
        return func(real(parts), dim) if made is None else made

    def contraction(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An einsum of two operands that is a product of matrices under other names."""
        found = None if kwargs else as_product(*args)
        if found is None:
            return func(*real(args), **real(kwargs))
        left, right, restored = found
        if isinstance(left, Scores):
            out = attended(left, right)
            return func(*real(args)) if out is None else restored(out)
        if not restored.is_identity or not _could_be(left, right):
            return func(*args)
        return Scores(left, right, ((func, args, {}),), self.shortest)


def _is_zero(bias: Tensor) -> bool:
    """Whether a model only needed something to add to: looking is quicker than adding."""
    costly = torch.compiler.is_compiling() or bias.device.type != "cpu"
    if costly or bias.requires_grad or bias.numel() == 0:
        return False
    low, high = torch.aminmax(bias)
    return bool(low == 0) and bool(high == 0)


def _is_swapped(func: Any, left: Any, right: Any) -> bool:
    """torch.compile hands ``scores @ value`` over as ``Tensor.matmul(value, scores)``.

    So it does ``value @ scores``, which where both fit is taken for the other: nobody multiplies
    with probabilities from that side without transposing them, and then they are a tensor.
    """
    return (
        torch.compiler.is_compiling()
        and func is torch.Tensor.matmul
        and isinstance(left, Tensor)
        and isinstance(right, Scores)
        and left.shape[-2] == right.k
    )


def _could_be(left: Any, right: Any) -> bool:
    both = isinstance(left, Tensor) and isinstance(right, Tensor)
    return both and left.ndim == right.ndim >= 3 and left.is_floating_point()


def attended(scores: Scores, value: Tensor) -> Tensor | None:
    """``softmax(scores) @ value`` by the fused kernel; None where the model's own way is right.

    ``value`` is ``[.., k, e]`` with the batch axes that the model sees; so is the answer.
    """
    if not _fits(scores, value):
        return None
    bias = scores.bias
    along = (1,) * len(scores.fine) if bias is None else tuple(bias.shape[:-2])
    cut, along = halves(scores.fine, along)
    batch, heads = prod(scores.fine[:cut]), prod(scores.fine[cut:])
    query = _grouped(_scaled(scores), scores, batch, heads).to(value.dtype)
    key = _grouped(scores.right.transpose(-1, -2), scores, batch, heads).to(value.dtype)
    if bias is not None:
        bias = bias.expand(*along, *bias.shape[-2:])
        bias = bias.reshape(prod(along[:cut]), prod(along[cut:]), *bias.shape[-2:])
        bias = _narrowed(bias, value.dtype)
    packed = value.reshape(batch, heads, *value.shape[-2:])
    sdpa = F.scaled_dot_product_attention
    out = called(sdpa, query, key, packed, attn_mask=bias, scale=scores.scale)
    out = out.reshape(*scores.lead, *out.shape[-2:])
    if scores.zeroed is not None:
        empty = scores.zeroed.all(-1, keepdim=True).expand(*scores.fine, scores.q, 1)
        out = out.masked_fill(empty.reshape(*scores.lead, scores.q, 1), 0.0)
    return out


def _fits(scores: Scores, value: Tensor) -> bool:
    bias = scores.bias
    return (
        scores.normal
        and scores.real is None
        and scores.k >= scores.shortest
        and scores.q > 0
        and tuple(value.shape[:-2]) == scores.lead
        and prod(scores.lead) > 0
        and value.is_floating_point()
        and not (bias is not None and _learns(scores, value) and spoils_gradients(bias))
    )


def _learns(scores: Scores, value: Tensor) -> bool:
    for one in (scores.left, scores.right, value, scores.bias, scores.factor):
        if one is not None and one.requires_grad:
            return torch.is_grad_enabled()
    return False


def _scaled(scores: Scores) -> Tensor:
    if scores.factor is None:
        return scores.left
    left = scores.left.expand(*_first_lead(scores), *scores.left.shape[-2:])
    fine = left.reshape(*scores.fine, *left.shape[-2:])
    return (fine * scores.factor).reshape(left.shape)


def _grouped(value: Tensor, scores: Scores, batch: int, heads: int) -> Tensor:
    lead = _first_lead(scores)
    whole = value if value.shape[:-2] == lead else value.expand(*lead, *value.shape[-2:])
    return whole.reshape(batch, heads, *value.shape[-2:])


def _first_lead(scores: Scores) -> Axes:
    return broadcast(scores.left.shape[:-2], scores.right.shape[:-2])


def _narrowed(bias: Tensor, dtype: torch.dtype) -> Tensor:
    if bias.device.type == "cpu" and bias.dtype is torch.float32 and dtype.itemsize < 4:
        # The CPU's kernel takes it as it is, and a mask of fp32 does not swallow scores in fp16.
        return bias
    if torch.finfo(dtype).max < torch.finfo(bias.dtype).max:
        # Else the lowest number of the wider type would become minus infinity.
        bias = bias.clamp(min=torch.finfo(dtype).min)
    return bias.to(dtype)


def called(
    func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """A call of SDPA, with operands that torch would else not give to its fused kernel.

    Its unfused path is for keys that are to be broadcast over heads (Falcon), for values that are
    narrower (Conditional DETR), and for a last axis that is not dense (Inkling).
    """
    if not kwargs.get("enable_gqa"):
        lead = query.shape[:-2]
        key, value = (one.expand(*lead, *one.shape[-2:]) for one in (key, value))
    if kwargs.get("scale") is None:
        kwargs["scale"] = query.shape[-1] ** -0.5
    mask = kwargs.get("attn_mask")
    if mask is not None and mask.stride(-1) != 1:
        kwargs["attn_mask"] = mask = mask.contiguous()
    if not args and kwargs.keys() <= {"attn_mask", "scale"}:
        ours = attention(query, key, value, mask=mask, scale=kwargs["scale"])
        if ours is not None:
            return ours.transpose(1, 2)
    size = max(query.shape[-1], value.shape[-1])
    operands = [widened(one, size) for one in (query, key, value)]
    out: Tensor = func(*operands, *args, **kwargs)
    return out[..., : value.shape[-1]]
