"""Attention scores that stay unwritten until somebody looks at them.

A model that writes its attention out by hand multiplies q and k, scales, adds masks and biases,
takes the softmax and multiplies with v. A ``Scores`` stands for the ``[.., q, k]`` tensor on that
way: it remembers what was done, and the product with v becomes one call of PyTorch's
``scaled_dot_product_attention``. Whatever it cannot put into that form is done on the real
tensor, by the very calls that the model made: the answer is then the stock answer, bit for bit.

Source: Dao et al. 2022, arXiv 2205.14135, for why the tensor is better never written.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from optimus.ops.axes import Axes, broadcast, without_ones

# Fills from here down are masks: what they leave of a softmax is exactly zero.
MASKED = -1e4


# What can be put into the form of one kernel call, by torch's names (``rules``).
RULES: dict[str, Callable[..., Any]] = {}
IN_PLACE: dict[str, str] = {}


class Self:
    """Stands for the tensor itself in a recorded call."""


SELF = Self()


def rule(*names: str, in_place: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Enter a function under the names by which torch and torch.compile call the operation."""

    def enter(function: Any) -> Any:
        RULES.update(dict.fromkeys(names, function))
        IN_PLACE.update(dict.fromkeys(in_place, names[0]))
        return function

    return enter


class Scores:
    """``left @ right``, and what has been done to it since.

    ``lead`` are its axes before ``[q, k]`` as the model sees them now, ``fine`` the ones that all
    views share. ``bias`` is added and ``factor`` multiplied, both along the fine axes; ``gate`` is
    a mask of zeros and ones multiplied in that waits for what is added where it is zero, and
    ``peaked`` says that the largest was taken off. ``blocks`` are what ``right`` was made of.
    ``shortest``: the number of keys from which on the fused kernel was measured to pay.
    """

    def __init__(self, left: Tensor, right: Tensor, steps: tuple[Any, ...], shortest: int) -> None:
        self.left, self.right, self.steps, self.shortest = left, right, steps, shortest
        self.lead: Axes = broadcast(left.shape[:-2], right.shape[:-2])
        self.fine: Axes = without_ones(self.lead)
        self.q, self.k = left.shape[-2], right.shape[-1]
        self.scale = 1.0
        self.factor: Tensor | None = None
        self.gate: Tensor | None = None
        self.bias: Tensor | None = None
        self.filled: Tensor | None = None
        self.zeroed: Tensor | None = None
        self.peaked = self.normal = False
        self.blocks: tuple[Tensor, ...] = ()
        self.grads = torch.is_grad_enabled()
        self.dtype = _product_dtype(left)
        self.real: Tensor | None = None

    def copied(self) -> Scores:
        """Another of the same state, to be changed."""
        new: Scores = object.__new__(Scores)
        new.become(self)
        return new

    def become(self, other: Scores) -> None:
        """Take the state of ``other``: what an in-place operation does."""
        vars(self).update(vars(other))

    def dense(self) -> Tensor:
        """The tensor itself. From here on this object is only a name for it."""
        if self.real is None:
            value: Any = None
            # A model may look at its scores where gradients are off, and go on where they are not.
            with torch.set_grad_enabled(self.grads):
                for func, args, kwargs in self.steps:
                    value = func(*_put(args, value), **_put(kwargs, value))
            self.real = value
        assert self.real is not None
        return self.real

    @property
    def shape(self) -> torch.Size:
        """As the model sees it now."""
        return torch.Size((*self.lead, self.q, self.k))

    @property
    def device(self) -> torch.device:
        """Where q and k are."""
        return self.left.device

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.lead) + 2

    def dim(self) -> int:
        """Number of axes."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one axis of it."""
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in RULES or name in IN_PLACE:
            func = getattr(torch.Tensor, name)
            return lambda *args, **kwargs: handle_torch_function(
                func, (self,), self, *args, **kwargs
            )
        return getattr(handle_torch_function(written, (self,), self), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return respond(func, args, kwargs or {})


class Derived:
    """What a model reads off scores and may yet drop, itself unwritten.

    ``is_peak``: the largest score of all, or of each row. Models take it off, and softmax does not
    see it.
    """

    def __init__(self, of: Scores, steps: tuple[Any, ...] = (), *, is_peak: bool = False) -> None:
        self.of, self.was, self.steps, self.is_peak = of, of.copied(), steps, is_peak

    def dense(self) -> Tensor:
        """The tensor, by the model's own calls."""
        value: Any = self.was.dense()
        for func, args, kwargs in self.steps:
            value = func(*_put(args, value), **_put(kwargs, value))
        found: Tensor = value
        return found

    def __getitem__(self, index: Any) -> Any:
        # ``torch.max`` along an axis gives values and places; only the values are a peak.
        return self._then(operator.getitem, index) if index == 0 else self.dense()[index]

    def unsqueeze(self, dim: int) -> Derived:
        """The axis that was reduced, put back."""
        return self._then(torch.unsqueeze, dim)

    def _then(self, func: Any, *args: Any) -> Derived:
        steps = (*self.steps, (func, (SELF, *args), {}))
        return Derived(self.of, steps, is_peak=self.is_peak)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(handle_torch_function(written, (self,), self), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*real(args), **real(kwargs or {}))


def _product_dtype(left: Tensor) -> torch.dtype:
    kind = left.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else left.dtype


def _put(value: Any, real: Tensor) -> Any:
    """``value`` with the tensor in the place that stands for it, at any depth."""
    if value is SELF:
        return real
    if isinstance(value, (Scores, Derived)):
        return value.dense()
    if isinstance(value, (tuple, list)):
        return type(value)([_put(one, real) for one in value])
    if isinstance(value, dict):
        return {key: _put(one, real) for key, one in value.items()}
    return value


def _noted(value: Any) -> Any:
    """An argument as it is now: other scores may be changed in place later."""
    return value.copied() if isinstance(value, Scores) else value


def real(value: Any) -> Any:
    """``value`` with everything unwritten in it replaced by its tensor."""
    if isinstance(value, (Scores, Derived)):
        return value.dense()
    if type(value) in (tuple, list):
        return type(value)([real(one) for one in value])
    if type(value) is dict:
        return {key: real(one) for key, one in value.items()}
    return value


def written(value: Tensor) -> Tensor:
    """``value`` as a tensor; no rule is entered for it, so a ``Scores`` is written out."""
    return value


def first(args: tuple[Any, ...]) -> Scores | None:
    """The first ``Scores`` among arguments."""
    for one in args:
        if isinstance(one, Scores):
            return one
    return None


def respond(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` gives where a ``Scores`` is among its arguments."""
    name = func.__name__
    in_place = name in IN_PLACE
    known = RULES.get(IN_PLACE[name] if in_place else name)
    subject = first(args)
    if known is None or subject is None or subject.real is not None:
        return func(*real(args), **real(kwargs))
    # A gate can only be taken up by an addition.
    waits = subject.gate is not None and known is not RULES["add"]
    # What is done where gradients are off must not be taken up where they are on.
    apart = waits or torch.is_grad_enabled() != subject.grads
    made = None if apart else known(*args, **kwargs)
    if made is None:
        return func(*real(args), **real(kwargs))
    if not isinstance(made, (Scores, Derived)):
        return made
    recorded = tuple([SELF if one is subject else _noted(one) for one in args])
    before = subject.steps if isinstance(made, Scores) else ()
    made.steps = (*before, (func, recorded, real(kwargs)))
    if in_place and isinstance(made, Scores):
        subject.become(made)
        return subject
    return made


def _operator(name: str) -> Callable[..., Any]:
    func = getattr(torch.Tensor, name)
    return lambda self, *args: handle_torch_function(func, (self,), self, *args)


for _name in (
    *("add", "sub", "mul", "truediv", "matmul", "pow", "and", "or", "xor", "floordiv", "mod"),
    *("radd", "rsub", "rmul", "rtruediv", "rmatmul", "rpow", "iadd", "isub", "imul", "itruediv"),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "invert"),
    *("getitem", "setitem", "len", "bool", "float"),
):
    setattr(Scores, f"__{_name}__", _operator(f"__{_name}__"))
Scores.__hash__ = object.__hash__  # type: ignore[method-assign]
