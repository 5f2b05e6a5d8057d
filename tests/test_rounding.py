"""Rounding a weight: the compiled search and torch's choose the same codes and scales."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optimus.ops import native
from optimus.ops.quantized import QuantizedWeight, Scheme

GROUPS = (32, 64, 128, 0)
SCHEMES = [
    Scheme(bits, group, symmetric=symmetric)
    for bits, group, symmetric in itertools.product((4, 8), GROUPS, (True, False))
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _outliers(x: Tensor) -> Tensor:
    x[::3, ::50] *= 1000
    x[1::3, 7] = -3
    return x


def _some_rows_alone(x: Tensor) -> Tensor:
    x[:5], x[5], x[6], x[7] = 0, 0.3, -0.0, -0.7
    x[8, 1:], x[9, ::2] = 0, 0
    return x


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda x: x,
    "shifted": lambda x: x.abs() + 0.01,
    "outliers": _outliers,
    "constant and zero": _some_rows_alone,
    "grid": lambda x: (x * 100).round() / 8,
    "tiny": lambda x: x * 1e-18,
    "denormal": lambda x: x * 1e-37,
    "large": lambda x: x * 1e4,
    "beyond": lambda x: x * 1e36 if x.dtype is not torch.float16 else x * 1e-6,
    "transposed": lambda x: x.t().contiguous().t(),
    "with gaps": lambda x: x.repeat(2, 2)[::2, : x.shape[1]],
}


def _both(
    monkeypatch: pytest.MonkeyPatch, weight: Tensor, scheme: Scheme, importance: Tensor | None
) -> tuple[QuantizedWeight, QuantizedWeight]:
    """By this machine's route, which is the compiled one where there is a compiler, and torch's."""
    mine = QuantizedWeight(weight, scheme, importance)
    with monkeypatch.context() as patch:
        patch.setattr(native, "available", lambda: "asked for by the test")
        return mine, QuantizedWeight(weight, scheme, importance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_same_bits(
    scheme: Scheme, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """Codes, scales and minima, for weights of every kind, weighed by importance and not."""
    generator = torch.Generator().manual_seed(scheme.bits)
    # Rows that do not fill a tile, and a width that no layout divides where none has to.
    width = 384 if scheme.group else 413
    for kind, change in KINDS.items():
        weight = change((torch.randn(37, width, generator=generator) * 0.05).to(dtype))
        seen = torch.rand(width, generator=generator).mul(12).exp()
        seen[::7] = 0
        for importance in (None, seen):
            mine, torchs = _both(monkeypatch, weight, scheme, importance)
            for part, other in zip(mine.tiles, torchs.tiles, strict=True):
                assert (part is None) == (other is None)
                assert part is None or torch.equal(part, other), (kind, importance is None)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_any_size_of_number(scheme: Scheme) -> None:
    """Weights whose squares are beyond fp32, or nothing in it, are rounded nearly as well."""
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(4))
    for power in (-30, -20, 0, 20, 30, 37):
        given = weight * 10.0**power
        far = QuantizedWeight(given, scheme).dense().double() - given.double()
        error = far.norm() / given.double().norm()
        assert error < (0.012 if scheme.bits == 8 else 0.2), (power, error)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_threads_and_blocks_change_nothing(scheme: Scheme) -> None:
    """A weight of many tiles is rounded as its parts are, by any number of threads."""
    weight = torch.randn(400, 256, generator=torch.Generator().manual_seed(3))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(QuantizedWeight(weight, scheme).dense())
    finally:
        torch.set_num_threads(before)
    parts = [QuantizedWeight(part, scheme).dense() for part in weight.split(48)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], torch.cat(parts))


def test_importance_of_another_width() -> None:
    """Importance must be of the weight's input features."""
    with pytest.raises(RuntimeError, match="64"):
        QuantizedWeight(torch.randn(16, 64), Scheme(4), torch.ones(32))
