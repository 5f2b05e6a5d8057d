"""Quantized linear layers: what they compute, by every route, and how well a weight is rounded."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import Tensor

from optimus.ops import native
from optimus.ops.held import held_linear
from optimus.ops.quantized import (
    INT4,
    INT8,
    INT8_DYNAMIC,
    QuantizedWeight,
    Scheme,
    importance,
    unfit,
)

SCHEMES = (
    INT8,
    INT8_DYNAMIC,
    INT4,
    Scheme(8, 64, symmetric=False),
    Scheme(8, 0, symmetric=False, rows=True),
    Scheme(8, 128, rows=True),
    Scheme(4, 32, symmetric=False),
    Scheme(4, 64),
    Scheme(4, 128, symmetric=False, rows=True),
    Scheme(4, 0),
)
ROWS = (0, 1, 2, 3, 5, 17, 64)
CASES = ((torch.float32, False), (torch.bfloat16, True), (torch.float16, True))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Without a compiler there is one route; the others are not missed, they are not there.
ROUTES = ("torch", "portable", "best") if native.available() is None else ("torch",)
EXACT = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way of computing the product, for the weights made in the test."""
    if request.param == "torch":
        monkeypatch.setattr(native, "available", lambda: "asked for by the test")
    if request.param == "portable":
        monkeypatch.setattr(native._load(), "kernels", native.PORTABLE)
    return request.param


def _weight(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)) * 0.02


def _rounded(x: Tensor, scheme: Scheme) -> Tensor:
    """Activations as the kernels round them, one number at a time in fp32, kept in fp64."""
    group = x.shape[-1] if scheme.rows or not scheme.group else scheme.group
    parts = x.float().unflatten(-1, (-1, group))
    most = parts.abs().amax(-1, keepdim=True)
    codes = (parts * (torch.full_like(most, 127) / most).nan_to_num(0, 0, 0)).round()
    return (codes.double() * (most / 127)).flatten(-2)


def _distance(mine: Tensor, exact: Tensor) -> float:
    return ((mine.double() - exact).norm() / exact.norm()).item() if exact.numel() else 0.0


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_product(route: str, scheme: Scheme, threads: int) -> None:
    """Any number of rows, odd sizes, each dtype, with and without a bias: the exact sum."""
    for rows, width in ((75, 384 if scheme.group else 515), (33, 128 if scheme.group else 7)):
        weight = QuantizedWeight(_weight(rows, width), scheme)
        dense = weight.dense().double()
        for count, (dtype, biased) in itertools.product(ROWS, CASES):
            x = torch.randn(count, width).to(dtype)
            bias = torch.randn(rows).to(dtype) if biased else None
            exact = _rounded(x, scheme) @ dense.T + (bias.double() if biased else 0)
            mine = weight.matmul(x, bias)
            assert (mine.dtype, mine.shape) == (dtype, (count, rows))
            assert _distance(mine, exact) < EXACT[dtype], (rows, count, dtype, biased)


@pytest.mark.parametrize("scheme", [INT8, INT8_DYNAMIC, INT4], ids=str)
def test_many_blocks(route: str, scheme: Scheme) -> None:
    """A weight of several blocks and rows of several chunks."""
    weight = QuantizedWeight(_weight(80, 32768), scheme)
    x = torch.randn(140, 32768)
    exact = _rounded(x, scheme) @ weight.dense().double().T
    assert _distance(weight.matmul(x, None), exact) < 2e-6


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_row_does_not_see_its_company(scheme: Scheme) -> None:
    """The compiled kernels give a row the same bits alone and among others, by any threads."""
    weight = QuantizedWeight(_weight(75, 512), scheme)
    x = torch.randn(29, 512)
    together = weight.matmul(x, None)
    alone = torch.cat([weight.matmul(row, None) for row in x.split(1)])
    equal = torch.equal if native.available() is None else torch.allclose
    assert equal(together, alone)


def test_strides(route: str) -> None:
    """Leading dimensions, views with gaps and transposed inputs are read where they lie."""
    weight = QuantizedWeight(_weight(48, 64), INT4)
    x = torch.randn(3, 5, 2, 64)
    flat = weight.matmul(x.reshape(-1, 64), None).view(3, 5, 2, 48)
    turned = x[0].reshape(10, 64).T.contiguous().T
    cases = (
        (x, flat),
        (x[:, -1:, 0], flat[:, -1:, 0]),
        (x.transpose(0, 1), flat.transpose(0, 1)),
        (x[0, 0, 0], flat[0, 0, 0]),
        (x[:, :, 0].expand(2, 3, 5, 64), flat[:, :, 0].expand(2, 3, 5, 48)),
        (turned, flat[0].view(10, 48)),
    )
    for view, expected in cases:
        assert torch.allclose(weight.matmul(view, None), expected, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("scheme", [INT8, INT8_DYNAMIC, INT4, SCHEMES[6]], ids=str)
def test_bad_rows_come_out_as_nan(route: str, scheme: Scheme, bad: float) -> None:
    """NaN or infinity anywhere in a row makes all of its output NaN, and no other row's."""
    weight = QuantizedWeight(_weight(40, 256), scheme)
    x = torch.randn(9, 256)
    clean = weight.matmul(x, None)
    x[4, 77] = bad
    mine = weight.matmul(x, None)
    assert mine[4].isnan().all()
    assert torch.equal(mine[[0, 3, 5, 8]], clean[[0, 3, 5, 8]])


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_extremes(route: str, scheme: Scheme) -> None:
    """Zeros, the smallest and the largest numbers: finite, and zero for zero."""
    plain = _weight(32, 256)
    plain[:8], plain[8:16] = 0, plain[8:16] * 1e-38
    plain[16:20], plain[24, 100:] = plain[16:20] * 1e37, 0
    weight = QuantizedWeight(plain, scheme)
    assert weight.dense().isfinite().all()
    assert weight.dense()[:8].count_nonzero() == 0
    x = torch.zeros(4, 256)
    x[1], x[2] = 1e-40, 1e30
    mine = weight.matmul(x, None)
    assert mine[[0, 1]].count_nonzero() == 0
    assert mine[2, 20:].isfinite().all()


def test_wrong_input() -> None:
    """The wrong width or dtype is an error that says both."""
    weight = QuantizedWeight(_weight(16, 64), INT8)
    with pytest.raises(ValueError, match=r"takes \[..., 64\].*given \(2, 65\)"):
        weight.matmul(torch.randn(2, 65), None)
    with pytest.raises(ValueError, match="float64"):
        weight.matmul(torch.randn(2, 64).double(), None)


def test_unfit() -> None:
    """What cannot be rounded is refused with its reason; asked for all the same, an error."""
    good = _weight(16, 96)
    bad = good.clone()
    bad[3, 4] = torch.nan
    reasons = {
        "64 do not divide 96": unfit(good, Scheme(4, 64)),
        "a multiple of 32": unfit(good, Scheme(4, 48)),
        "only 4 and 8": unfit(good, Scheme(3, 32)),
        "3 dimensions": unfit(good.unsqueeze(0), INT8),
        "float64": unfit(good.double(), INT8),
        "on meta": unfit(good.to("meta"), INT8),
        "empty": unfit(good[:0], INT8),
        "NaN, infinity": unfit(bad, INT8),
        "beyond 1e38": unfit(good.sign() * 2e38, INT8),
        "overflow": unfit(torch.zeros(1, 131_104), INT8),
    }
    for reason, refusal in reasons.items():
        assert refusal is not None
        assert reason in refusal.reason
    assert unfit(good, INT4) is None
    with pytest.raises(ValueError, match="NaN, infinity"):
        QuantizedWeight(bad, INT8)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies(scheme: Scheme, dtype: torch.dtype) -> None:
    """Copied and pickled weights hold the same codes, and a handle of their own."""
    weight = QuantizedWeight(_weight(40, 256).to(dtype), scheme)
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert other.handle != weight.handle
        assert other.dense().dtype is dtype
        assert torch.equal(other.dense(), weight.dense())
        assert (other.scheme, other.nbytes) == (weight.scheme, weight.nbytes)
        x = torch.randn(3, 256)
        assert torch.equal(other.matmul(x, None), weight.matmul(x, None))


def test_bytes() -> None:
    """8 bits in groups of 32 cost 8.5 bits a weight, 4 bits 4.5, channels 8 and next to nothing."""
    plain = _weight(64, 512)
    bits = [QuantizedWeight(plain, s).nbytes * 8 / plain.numel() for s in (INT8, INT4)]
    assert bits == [8.5, 4.5]
    assert QuantizedWeight(plain, INT8_DYNAMIC).nbytes == 64 * 512 + 64 * 2


@pytest.mark.parametrize("scheme", [INT8, INT8_DYNAMIC, INT4], ids=str)
def test_gradient(scheme: Scheme) -> None:
    """The input's gradient is that of the rounded weight; the bias has its own."""
    weight = QuantizedWeight(_weight(40, 256), scheme)
    x, bias = torch.randn(2, 3, 256, requires_grad=True), torch.randn(40, requires_grad=True)
    grad = torch.randn(2, 3, 40)
    held_linear(x, weight.handle, bias, 40).backward(grad)
    assert torch.allclose(x.grad, grad @ weight.dense(), atol=1e-6)
    assert torch.allclose(bias.grad, grad.sum((0, 1)), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled(dtype: torch.dtype) -> None:
    """One graph, without a break, and the same numbers."""
    weight = QuantizedWeight(_weight(40, 256), INT4)

    def layer(x: Tensor) -> Tensor:
        return held_linear(x, weight.handle, None, 40) * 2

    x = torch.randn(2, 3, 256).to(dtype)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), weight.matmul(x, None) * 2)


def _error(weight: Tensor, rounded: Tensor, worth: Tensor | None = None) -> float:
    squares = (weight - rounded).square()
    return (squares if worth is None else squares * worth).mean().item()


def _nearest(weight: Tensor, scheme: Scheme) -> Tensor:
    """Plain round-to-nearest: the scale is that of the largest number."""
    groups = weight.unflatten(-1, (-1, scheme.group))
    if scheme.symmetric:
        scale = groups.abs().amax(-1, keepdim=True) / 7
        return ((groups / scale).round() * scale).flatten(-2)
    low = groups.amin(-1, keepdim=True)
    scale = (groups.amax(-1, keepdim=True) - low) / 15
    return (((groups - low) / scale).round() * scale + low).flatten(-2)


@pytest.mark.parametrize(
    ("scheme", "factor"),
    [
        (INT4, 1.38),
        (Scheme(4, 128), 1.43),
        (SCHEMES[6], 1.13),
        (Scheme(4, 128, symmetric=False), 1.12),
    ],
    ids=str,
)
def test_better_than_nearest(scheme: Scheme, factor: float) -> None:
    """The mean squared error of 4 bits is lower than round-to-nearest's by this factor."""
    plain = _weight(256, 1024)
    mine = _error(plain, QuantizedWeight(plain, scheme).dense())
    assert _error(plain, _nearest(plain, scheme)) > factor * mine


@pytest.mark.parametrize("scheme", [INT4, SCHEMES[6]], ids=str)
def test_importance(scheme: Scheme) -> None:
    """Knowing the activations lowers the error of the product on others of their kind."""
    torch.manual_seed(1)
    spread = torch.exp(torch.randn(512) * 1.5)
    plain = _weight(128, 512)
    seen, unseen = (torch.randn(4, 64, 512) * spread for _ in range(2))
    worth = importance(seen)
    assert torch.allclose(worth, seen.square().mean((0, 1)), rtol=1e-5)
    blind = QuantizedWeight(plain, scheme).dense()
    informed = QuantizedWeight(plain, scheme, worth).dense()
    exact = unseen @ plain.T
    errors = [(unseen @ dense.T - exact).square().mean() for dense in (blind, informed)]
    assert errors[0] > 1.2 * errors[1]
    assert torch.equal(QuantizedWeight(plain, INT4, torch.zeros(512)).dense(), _blind(plain))


def _blind(plain: Tensor) -> Tensor:
    return QuantizedWeight(plain, INT4).dense()


def test_eight_bits_reach_their_largest() -> None:
    """8 bits are exact to half a step everywhere, so nothing is cut off at the ends."""
    plain = _weight(64, 512)
    for scheme in (INT8, INT8_DYNAMIC, SCHEMES[3]):
        step = plain.unflatten(-1, (-1, scheme.group or 512)).abs().amax(-1, keepdim=True) / 127
        far = (QuantizedWeight(plain, scheme).dense() - plain).abs()
        assert (far.unflatten(-1, (-1, scheme.group or 512)) <= 0.51 * step).all()


def test_missing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Without the compiled library the reason is said and torch's operators are used."""
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    native._load.cache_clear()
    try:
        assert "no C compiler" in (native.available() or "")
        weight = QuantizedWeight(_weight(16, 64), INT4)
        assert weight.matmul(torch.randn(2, 64), None).isfinite().all()
    finally:
        native._load.cache_clear()
