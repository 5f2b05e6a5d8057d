"""Einsums of two operands, read as products of batches of matrices."""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from torch import Tensor

from optimus.ops.scores import Scores


@dataclass(frozen=True)
class Restored:
    """Puts the axes of a product into the order that the equation asks for."""

    order: tuple[int, ...]

    @property
    def is_identity(self) -> bool:
        """Whether the product is already in that order."""
        return self.order == tuple(range(len(self.order)))

    def __call__(self, value: Tensor) -> Tensor:
        """The product, permuted."""
        return value.permute(self.order)


def as_product(equation: Any, *operands: Any) -> tuple[Any, Any, Restored] | None:
    """Operands ``[batch.., i, s]`` and ``[batch.., s, j]`` and what puts their product in order.

    Takes what ``torch.einsum`` takes. None where that is not a product of two batches of matrices,
    or would need scores in another order than they have.
    """
    both = operands[0] if len(operands) == 1 else operands
    if len(both) != 2 or not isinstance(equation, str) or "->" not in equation:
        return None
    left, right = both
    one, other, out = _named(equation, left.ndim, right.ndim)
    batch = [a for a in one if a in other and a in out]
    summed = [a for a in one if a in other and a not in out]
    rows = [a for a in one if a not in other]
    columns = [a for a in other if a not in one]
    if not len(summed) == len(rows) == len(columns) == 1 or len({*one, *other}) != len(batch) + 3:
        return None
    # Scores keep the order in which the model sees them, so theirs decides that of the batch.
    if isinstance(left, Scores) and "".join(batch + rows + summed) != one:
        return None
    if not isinstance(left, Scores):
        batch = [a for a in out if a in batch]
        left = left.permute([one.index(a) for a in batch + rows + summed])
    right = right.permute([other.index(a) for a in batch + summed + columns])
    product = batch + rows + columns
    return left, right, Restored(tuple(product.index(a) for a in out))


def _named(equation: str, *sizes: int) -> tuple[str, ...]:
    """The terms of an equation with a letter for every axis; capitals stand for an ellipsis."""
    terms = equation.replace(" ", "").replace("->", ",").split(",")
    hidden = max(
        size - len(term.replace("...", "")) for term, size in zip(terms, sizes, strict=False)
    )
    return tuple(term.replace("...", ascii_uppercase[:hidden]) for term in terms)
