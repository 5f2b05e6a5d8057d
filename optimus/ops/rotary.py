"""Complex numbers as pairs of real ones, for compilers and devices that have no complex arithmetic.

Rotary embeddings in the manner of Meta's reference Llama rotate by a complex product. Inductor
calls out of its kernels for each complex step, XLA and HPU devices have few or none, and
exporters refuse them. ``Pairs`` stands in for such a tensor and answers what rotary code asks of
it by real arithmetic; ``Reals`` lets a forward that nobody rewrote make pairs where it would have
made complex tensors. The rules know tensors and the proxies of a graph alike (``real``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

REAL = {torch.complex32: torch.half, torch.complex64: torch.float, torch.complex128: torch.double}
COMPLEX = {real: whole for whole, real in REAL.items()}

Call = Callable[..., Any]
Rule = Callable[..., Any]


class Pairs:
    """A complex tensor of that shape, as its two parts.

    ``real`` and ``imag`` have the shape of the complex tensor. What no rule knows is computed on
    the complex tensor itself, so it is never wrong, only complex again.
    """

    def __init__(self, real: Any, imag: Any) -> None:
        self.real, self.imag = real, imag

    @classmethod
    def of(cls, tensor: Tensor) -> Pairs:
        """A complex tensor, or the ``[..., 2]`` that ``stacked`` makes of one."""
        whole = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        return split(whole)

    def stacked(self) -> Any:
        """What ``torch.view_as_real`` gives of it, ``[..., 2]``, in memory of its own."""
        return torch.stack((self.real, self.imag), -1)

    def dense(self) -> Tensor:
        """The complex tensor."""
        return torch.complex(self.real, self.imag)

    @property
    def shape(self) -> torch.Size:
        """The shape of the complex tensor."""
        return self.real.shape  # type: ignore[no-any-return]

    @property
    def ndim(self) -> int:
        """How many dimensions the complex tensor has."""
        return self.real.ndim  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """Where its parts are."""
        return self.real.device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        """The complex dtype that it stands for."""
        return COMPLEX[self.real.dtype]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _answer(func, name_of(func), args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        """Any other method of a tensor."""
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(name)
        return lambda *args, **kwargs: _answer(getattr(Tensor, name), name, (self, *args), kwargs)

    def __getitem__(self, index: Any) -> Pairs:
        return Pairs(self.real[index], self.imag[index])

    def __neg__(self) -> Pairs:
        return _negative(self)

    def __mul__(self, other: Any) -> Any:
        return _product(self, other)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        return _answer(torch.add, "add", (self, other), {})

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return _answer(torch.sub, "sub", (self, other), {})

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __truediv__(self, other: Any) -> Any:
        return _answer(torch.div, "div", (self, other), {})


class Reals(TorchFunctionMode):
    """While active, what would make a complex tensor of real ones makes ``Pairs``."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in MAKERS:
            return MAKERS[func](*args, **kwargs)
        return func(*args, **kwargs)


def name_of(func: Any) -> str:
    """What a function, operator or overload is called in the tables: ``mul``, ``getitem``."""
    name = func if isinstance(func, str) else str(func.__name__).partition(".")[0]
    name = name[2:-2] if name.startswith("__") and name.endswith("__") else name
    return SYNONYMS.get(name, name)


def respond(call: Call, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call with ``Pairs`` among its arguments gives; NotImplemented if no rule knows it.

    ``call`` makes the same call of other arguments.
    """
    if not any(isinstance(one, Pairs) for one in leaves((args, kwargs))):
        return NotImplemented
    if name in ALIKE and _is_alike(name, args, kwargs):
        parts = [_part(part, (args, kwargs)) for part in ("real", "imag")]
        first, second = (call(*a, **k) for a, k in parts)
        return Pairs(first, second)
    if name in SIZES:
        return call(*_part("real", args), **kwargs)
    rule = RULES.get(name)
    return NotImplemented if rule is None else rule(*args, **kwargs)


def _answer(func: Call, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = respond(func, name, args, kwargs)
    return func(*_dense(args), **_dense(kwargs)) if found is NotImplemented else found


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple | list):
        return type(value)([_mapped(one, change) for one in value])
    if isinstance(value, dict):
        return {key: _mapped(one, change) for key, one in value.items()}
    return change(value)


def _dense(value: Any) -> Any:
    return _mapped(value, lambda one: one.dense() if isinstance(one, Pairs) else one)


def _part(part: str, value: Any) -> Any:
    """The arguments for one part: of every pair this part, of every complex dtype its real one."""

    def change(one: Any) -> Any:
        if isinstance(one, Pairs):
            return getattr(one, part)
        return REAL.get(one, one) if isinstance(one, torch.dtype) else one

    return _mapped(value, change)


def leaves(value: Any) -> list[Any]:
    """Everything in nested arguments."""
    found: list[Any] = []
    _mapped(value, found.append)
    return found


def _is_alike(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call does the same to both parts: no cast to real numbers, no reinterpretation,
    and nothing that joins pairs with other tensors."""
    every = leaves((args, kwargs))
    dtypes = [one for one in every if isinstance(one, torch.dtype)]
    if dtypes and (name not in CASTS or any(dtype not in REAL for dtype in dtypes)):
        return False
    if kwargs.get("out") is not None:
        return False
    return name in INDEXED or not any(_is_tensor(one) for one in every)


def value_of(node: fx.Node) -> Any:
    """What a step of a graph makes, without its numbers."""
    return node.meta.get("val", node.meta.get("example_value"))


def _is_tensor(value: Any) -> bool:
    return isinstance(value_of(value.node) if isinstance(value, fx.Proxy) else value, Tensor)


def _product(one: Any, other: Any) -> Any:
    if isinstance(one, Pairs) and isinstance(other, Pairs | complex):
        a, b, c, d = one.real, one.imag, other.real, other.imag
        return Pairs(a * c - b * d, a * d + b * c)
    if isinstance(other, Pairs):
        return _product(other, one)
    if _is_complex_tensor(other):
        return _product(one, Pairs.of(other))
    return Pairs(one.real * other, one.imag * other)


def _sum(one: Any, other: Any, *, alpha: float = 1) -> Any:
    if not isinstance(one, Pairs):
        one, other = other, one
    if alpha != 1 or not isinstance(other, Pairs | complex | float | int):
        return NotImplemented
    return Pairs(one.real + other.real, one.imag + other.imag)


def _difference(one: Any, other: Any, *, alpha: float = 1) -> Any:
    if alpha != 1 or not isinstance(one, Pairs) or not isinstance(other, Pairs | complex):
        return NotImplemented
    return Pairs(one.real - other.real, one.imag - other.imag)


def _quotient(one: Any, other: Any, **kwargs: Any) -> Any:
    divisible = not isinstance(other, Pairs | complex) and not _is_complex_tensor(other)
    if kwargs or not isinstance(one, Pairs) or not divisible:
        return NotImplemented
    return Pairs(one.real / other, one.imag / other)


def _negative(one: Pairs) -> Pairs:
    return Pairs(-one.real, -one.imag)


def _is_complex_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


def split(value: Any) -> Pairs:
    """``torch.view_as_complex``: of ``[..., 2]``."""
    return Pairs(torch.select(value, -1, 0), torch.select(value, -1, 1))


def polar(abs: Any, angle: Any) -> Pairs:
    """``torch.polar``: of lengths and angles in radians."""
    return Pairs(abs * torch.cos(angle), abs * torch.sin(angle))


# What an op, a function and a method of one meaning are called.
SYNONYMS = {
    "_conj": "conj",
    "_to_copy": "to",
    "multiply": "mul",
    "negative": "neg",
    "rmul": "mul",
    "subtract": "sub",
    "truediv": "div",
    "true_divide": "div",
}
CASTS = frozenset({"to"})
INDEXED = frozenset({"getitem", "index", "index_select"})
# What does to a complex tensor as it does to its parts.
ALIKE = (
    CASTS
    | INDEXED
    | {
        "_unsafe_view",
        "alias",
        "cat",
        "clone",
        "contiguous",
        "cpu",
        "cuda",
        "detach",
        "expand",
        "expand_as",
        "flatten",
        "lift_fresh_copy",
        "movedim",
        "narrow",
        "permute",
        "repeat",
        "reshape",
        "select",
        "slice",
        "squeeze",
        "stack",
        "sum",
        "transpose",
        "unflatten",
        "unsqueeze",
        "view",
        "view_as",
    }
)
SIZES = frozenset({"dim", "numel", "size", "sym_numel", "sym_size"})
RULES: dict[str, Rule] = {
    "add": _sum,
    "conj": lambda one: Pairs(one.real, -one.imag),
    "conj_physical": lambda one: Pairs(one.real, -one.imag),
    "div": _quotient,
    "getattr": lambda one, name: getattr(one, name) if name in ("real", "imag") else NotImplemented,
    "imag": lambda one: one.imag,
    "mul": _product,
    "neg": _negative,
    "real": lambda one: one.real,
    "resolve_conj": lambda one: one,
    "resolve_neg": lambda one: one,
    "sub": _difference,
    "view_as_real": lambda one: one.stacked(),
}
MAKERS: dict[Any, Rule] = {torch.polar: polar, torch.view_as_complex: split}
