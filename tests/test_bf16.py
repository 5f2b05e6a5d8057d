"""Linear layers in bf16: what the packed product computes, and that packing loses nothing."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from optimus.ops import native
from optimus.ops.held import held_linear
from optimus.ops.linear import Blocked, PackedWeight, Panels, layout_for

# Elsewhere there is one layout; the other is not missed, it is not there.
LAYOUTS = (Blocked, Panels) if native.multiplies_bf16() else (Blocked,)
SHAPES = ((75, 515), (16, 2), (1, 1), (64, 64), (130, 33), (33, 6), (200, 8190), (47, 9001))
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 17, 64, 70)
BIASES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> type[Blocked | Panels]:
    """Each layout that this processor has a product for."""
    return request.param


def _weight(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).bfloat16()


def _distance(mine: Tensor, exact: Tensor) -> float:
    return ((mine.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("shape", SHAPES)
def test_product(layout: type[Blocked | Panels], shape: tuple[int, int], threads: int) -> None:
    """Any number of rows and odd sizes: the sum in fp64, rounded once."""
    weight = _weight(*shape)
    packed = layout(weight)
    for rows in ROWS:
        x = torch.randn(rows, shape[1]).bfloat16()
        exact = x.double() @ weight.double().T
        mine = packed.matmul(x, None)
        assert (mine.dtype, mine.shape) == (torch.bfloat16, exact.shape)
        stock = _distance(linear(x, weight), exact)
        assert _distance(mine, exact) <= max(2 * stock, 1e-3), rows


def test_bias(layout: type[Blocked | Panels]) -> None:
    """A bias is added before the sum is rounded; ours reads one of any dtype."""
    weight = _weight(75, 129)
    packed = layout(weight)
    for dtype, rows in itertools.product(BIASES if layout is Panels else BIASES[:1], (1, 9)):
        bias = torch.randn(75).bfloat16().to(dtype)
        x = torch.randn(rows, 129).bfloat16()
        exact = x.double() @ weight.double().T + bias.double()
        assert _distance(packed.matmul(x, bias), exact) < 3e-3, dtype
    one = bias[:1]
    assert torch.equal(packed.matmul(x, one.expand(75)), packed.matmul(x, one.repeat(75)))


@pytest.mark.parametrize("width", [64, 65])
def test_strides(layout: type[Blocked | Panels], width: int) -> None:
    """Leading dimensions, views with gaps and transposed inputs."""
    packed = layout(_weight(48, width))
    x = torch.randn(3, 5, 2, width).bfloat16()
    flat = packed.matmul(x.reshape(-1, width), None).view(3, 5, 2, 48)
    turned = x[0].reshape(10, width).T.contiguous().T
    cases = (
        (x, flat),
        (x[:, -1:, 0], flat[:, -1:, 0]),
        (x.transpose(0, 1), flat.transpose(0, 1)),
        (x[0, 0, 0], flat[0, 0, 0]),
        (x[:, :, 0].expand(2, 3, 5, width), flat[:, :, 0].expand(2, 3, 5, 48)),
        (turned, flat[0].view(10, 48)),
        (torch.cat((x, x), -1)[..., width:], flat),
    )
    for view, expected in cases:
        mine = packed.matmul(view, None)
        assert mine.shape == expected.shape
        torch.testing.assert_close(mine, expected, rtol=2e-2, atol=1e-2)


def test_rows_beside_each_other(layout: type[Blocked | Panels]) -> None:
    """What is behind the end of an odd row, or of the last, is not read into the sums."""
    packed = layout(_weight(33, 65))
    x = torch.full((14, 67), torch.nan).bfloat16()
    x[:, :65] = torch.randn(14, 65)
    mine = packed.matmul(x[:, :65], None)
    assert mine.isfinite().all()
    torch.testing.assert_close(mine, packed.matmul(x[:, :65].clone(), None))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_bad_numbers(layout: type[Blocked | Panels], bad: float) -> None:
    """NaN and infinity come out where stock lets them, and in no other row or column."""
    weight, x = _weight(40, 257), torch.randn(9, 257).bfloat16()
    for row, column in ((4, 77), (7, 256)):
        x[row, column] = bad
    weight[9, 30] = bad
    mine, stock = layout(weight).matmul(x, None), linear(x, weight)
    torch.testing.assert_close(mine, stock, rtol=2e-2, atol=0.3, equal_nan=True)
    assert mine[4].isfinite().sum() == mine[7].isfinite().sum() == 0
    assert mine[[0, 3, 5, 8]].isfinite().sum() == 4 * 39


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_is_lost(shape: tuple[int, int]) -> None:
    """Panels, with a product on this processor or without, give every bit back."""
    bits = torch.randint(-(2**15), 2**15, (shape[0] + 1, shape[1]), dtype=torch.int16)
    for weight in (bits[:-1].view(torch.bfloat16), bits[1:].view(torch.bfloat16)):
        dense = Panels(weight).dense()
        assert dense.is_contiguous()
        assert dense.untyped_storage().nbytes() == weight.numel() * 2
        assert torch.equal(dense.view(torch.int16), weight.view(torch.int16))


def test_copies() -> None:
    """Copied and pickled weights hold the same numbers, and a handle of their own."""
    weight = PackedWeight(_weight(75, 129))
    x = torch.randn(3, 129).bfloat16()
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert other.handle != weight.handle
        assert torch.equal(other.dense(), weight.dense())
        assert torch.equal(other.matmul(x, None), weight.matmul(x, None))


def test_compiled() -> None:
    """One graph, without a break, and the same numbers; the gradient is the dense weight's."""
    plain = _weight(40, 256)
    weight = PackedWeight(plain)

    def layer(x: Tensor) -> Tensor:
        return held_linear(x, weight.handle, None, 40) * 2

    x = torch.randn(2, 3, 256).bfloat16().requires_grad_()
    mine = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(mine, weight.matmul(x.detach(), None) * 2)
    mine.backward(torch.ones_like(mine))
    assert torch.equal(x.grad, torch.full((2, 3, 40), 2.0).bfloat16() @ plain)


def test_made_in_inference_mode() -> None:
    """A weight that was packed in inference mode can be trained once it is given back."""
    with torch.inference_mode():
        packed = PackedWeight(_weight(75, 129))
    dense = packed.dense().requires_grad_()
    dense.sum().backward()
    assert dense.grad is not None


def test_wrong_input() -> None:
    """The wrong width, dtype or bias is an error, and nothing is read."""
    for layout in LAYOUTS:
        packed = layout(_weight(16, 64))
        with pytest.raises((ValueError, RuntimeError)):
            packed.matmul(torch.randn(2, 65).bfloat16(), None)
        with pytest.raises((ValueError, RuntimeError)):
            packed.matmul(torch.randn(2, 64).double(), None)
        with pytest.raises(RuntimeError):
            packed.matmul(torch.randn(2, 64).bfloat16(), torch.randn(15).bfloat16())


def test_which_layout(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """oneDNN's in fp32, where there is AMX, and where nothing was compiled."""
    monkeypatch.setattr(native, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert layout_for(torch.bfloat16) is Panels
    assert layout_for(torch.float32) is Blocked
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert layout_for(torch.bfloat16) is Blocked
    monkeypatch.undo()
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    native._load.cache_clear()
    try:
        weight = PackedWeight(_weight(75, 129))
        assert isinstance(weight.layout, Blocked)
        assert weight.matmul(torch.randn(2, 129).bfloat16(), None).shape == (2, 75)
    finally:
        native._load.cache_clear()
