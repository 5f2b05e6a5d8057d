"""Unwritten scores give what written ones give, whatever a model does to them on the way."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from optimus.ops.axes import halves, refined, spread
from optimus.ops.deferred import Deferred
from optimus.ops.scores import Scores

B, H, Q, K, D, E = 2, 3, 5, 7, 8, 6
LOWEST = torch.finfo(torch.float32).min


class Kernels(TorchDispatchMode):
    """Counts fused kernels and softmaxes that were written out."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = self.written = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.fused += "scaled_dot_product" in str(func)
        self.written += str(func).startswith("aten._softmax.")
        return func(*args, **(kwargs or {}))


def bias(*shape: int) -> torch.Tensor:
    """Something that does not depend on the queries."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).double()


def holes(*shape: int) -> torch.Tensor:
    """A mask with holes that leaves the first key of every row."""
    mask = bias(*shape) > 0.3
    mask[..., 0] = False
    return mask


BEFORE = {
    "scale": lambda s: s * 0.3,
    "divide": lambda s: s / math.sqrt(D),
    "divide by a tensor": lambda s: s / torch.tensor(1.7).double(),
    "scale a head": lambda s: s * bias(1, H, 1, 1).exp(),
    "reflected": lambda s: 0.5 * s,
    "a number": lambda s: s + 3,
    "add for all": lambda s: s + bias(Q, K),
    "add for a head": lambda s: s + bias(H, Q, K),
    "add for a row": lambda s: bias(B, 1, 1, K) + s,
    "subtract": lambda s: s - bias(B, 1, Q, K),
    "in place": lambda s: s.__iadd__(bias(B, H, 1, K)),
    "fill": lambda s: s.masked_fill(holes(B, 1, 1, K), LOWEST),
    "fill low": lambda s: s.masked_fill(holes(1, 1, Q, K), -1e4),
    "fill in place": lambda s: s.masked_fill_(holes(Q, K), LOWEST),
    "where": lambda s: torch.where(holes(1, 1, Q, K), torch.tensor(LOWEST), s),
    "gate": lambda s: s * ~holes(Q, K) + -1e4 * holes(Q, K).double(),
    "cast": lambda s: s.to(torch.float64).type_as(s),
    "flatten": lambda s: s.view(B * H, Q, K).reshape(B, H, Q, K),
    "split": lambda s: (s.view(1, B, H, Q, K) + bias(1, B, 1, Q, K)).view(B, H, Q, K),
    "floor": lambda s: torch.max(s, torch.tensor(torch.finfo(s.dtype).min)),
}
ODD = {
    "relu": lambda s: torch.relu(s) + 0,
    "tanh": lambda s: 3 * torch.tanh(s / 3),
    "index": lambda s: s[:, :, :, :],
    "look": lambda s: s * (1 if s.detach().sum() > 0 else 2),
    "fill with a score": lambda s: s.masked_fill(holes(Q, K), 0.5),
    "clamp": lambda s: s.clamp(-1, 1),
    "cat": lambda s: torch.cat([s, s])[:B],
}


def operands(dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v that want gradients."""
    torch.manual_seed(0)
    sizes = ((Q, D), (K, D), (K, E))
    return tuple(torch.randn(B, H, n, d, dtype=dtype).requires_grad_() for n, d in sizes)


def attention(steps, q, k, v):
    """Attention written by hand, with ``steps`` between the product and the softmax."""
    scores = torch.matmul(q, k.transpose(-1, -2))
    for step in steps:
        scores = step(scores)
    probabilities = F.dropout(F.softmax(scores, dim=-1), 0.1, training=False)
    return torch.matmul(probabilities.to(v.dtype), v)


def apart(mine: torch.Tensor, stock: torch.Tensor) -> float:
    """The relative error."""
    return float((mine - stock).norm() / stock.norm())


def outcome(steps, *, deferred: bool):
    """Answer, gradients and kernels of ``attention``."""
    given_ = operands()
    with Kernels() as seen:
        if deferred:
            with Deferred():
                out = attention(steps, *given_)
        else:
            out = attention(steps, *given_)
    out.square().sum().backward()
    return out.detach(), [t.grad for t in given_], seen


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(sorted(BEFORE)), max_size=5))
def test_what_fits_is_one_kernel(names):
    """Every order of operations that fit gives the stock answer and gradients, in one kernel."""
    steps = [BEFORE[name] for name in names]
    stock, slopes, _ = outcome(steps, deferred=False)
    mine, ours, seen = outcome(steps, deferred=True)
    # A gate is taken up by the addition after it only where nothing was added before.
    if "gate" not in names:
        assert (seen.fused, seen.written) == (1, 0)
    assert apart(mine, stock) <= 1e-11
    assert all(apart(one, other) <= 1e-10 for one, other in zip(ours, slopes, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(BEFORE)), max_size=3),
    st.sampled_from(sorted(ODD)),
    st.lists(st.sampled_from(sorted(BEFORE)), max_size=3),
)
def test_what_does_not_fit_is_the_stock_answer(before, odd, after):
    """One operation outside the rules, anywhere: the very calls of the model are made."""
    steps = [BEFORE[name] for name in before] + [ODD[odd]] + [BEFORE[name] for name in after]
    stock, slopes, _ = outcome(steps, deferred=False)
    mine, ours, seen = outcome(steps, deferred=True)
    assert seen.fused == 0
    assert torch.equal(mine, stock)
    assert all(torch.equal(a, b) for a, b in zip(ours, slopes, strict=True))


def test_dropout_in_training_is_stocks():
    """The same random numbers are drawn for the same probabilities."""

    def drop(q, k, v):
        return torch.matmul(F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.5, training=True), v)

    q, k, v = operands()
    torch.manual_seed(1)
    stock = drop(q, k, v)
    torch.manual_seed(1)
    with Deferred():
        mine = drop(q, k, v)
    assert torch.equal(mine, stock)


@pytest.mark.parametrize("fill", [LOWEST, -1e4, -1e9])
def test_a_row_without_keys_comes_out_even(fill):
    """Where every score is replaced by one number, every key counts the same, as in eager."""
    mask = holes(B, 1, Q, K)
    mask[0, :, 2] = True
    steps = [lambda s: s.masked_fill(mask, fill)]
    with torch.no_grad(), Kernels() as seen, Deferred():
        mine = attention(steps, *operands())
    assert seen.fused == 1
    assert torch.allclose(mine, attention(steps, *operands()), atol=2e-6)


def test_rows_without_keys_learn_like_stock():
    """The kernel's own backward pass would weigh every key of such a row as if it were alone."""
    mask = holes(B, 1, Q, K)
    mask[0, :, 2] = True
    steps = [lambda s: s.masked_fill(mask, LOWEST)]
    stock, slopes, _ = outcome(steps, deferred=False)
    mine, ours, seen = outcome(steps, deferred=True)
    assert seen.fused == 0
    assert torch.equal(mine, stock)
    assert all(torch.equal(a, b) for a, b in zip(ours, slopes, strict=True))


def test_zeroed_probabilities():
    """A mask that is applied again after the softmax empties rows that it covers."""
    mask = holes(B, 1, Q, K)
    mask[1, :, 3] = True

    def zeroed(q, k, v):
        scores = (q @ k.transpose(-1, -2)).masked_fill(mask, -1e9)
        return torch.matmul(scores.softmax(-1).masked_fill(mask, 0.0), v)

    q, k, v = (t.detach() for t in operands())
    with Kernels() as seen, Deferred():
        mine = zeroed(q, k, v)
    assert seen.fused == 1
    assert torch.allclose(mine, zeroed(q, k, v), atol=2e-6)
    assert mine[1, :, 3].abs().max() == 0


@pytest.mark.parametrize(
    ("into", "back", "shape"),
    [
        ("bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd", (B, H, Q, D)),
        ("ibnd,jbnd->bnij", "bnij,jbnd->ibnd", (Q, B, H, D)),
        ("bind,bjnd->bnij", "bnij,bjnd->bind", (B, Q, H, D)),
        ("...qhd,...khd->...hqk", "...hqk,...khd->...qhd", (B, Q, H, D)),
    ],
)
def test_einsums(into, back, shape):
    """Products that are spelled as einsums, in any order of axes."""

    def attend(q, k, v):
        return torch.einsum(back, torch.einsum(into, q, k).softmax(-1), v)

    q, k, v = (torch.randn(shape) for _ in range(3))
    with Kernels() as seen, Deferred():
        mine = attend(q, k, v)
    assert (seen.fused, seen.written) == (1, 0)
    assert torch.allclose(mine, attend(q, k, v), atol=2e-6)


def test_baddbmm():
    """A bias and a scale in the product itself, as Bloom writes it."""

    def attend(q, k, v):
        scores = bias(B * H, 1, K).baddbmm(batch1=q, batch2=k, beta=1.0, alpha=0.3)
        return torch.bmm(scores.softmax(-1), v)

    sizes = ((Q, D), (D, K), (K, E))
    q, k, v = (torch.randn(B * H, *size, dtype=torch.float64) for size in sizes)
    with Kernels() as seen, Deferred():
        mine = attend(q, k, v)
    assert (seen.fused, seen.written) == (1, 0)
    assert torch.allclose(mine, attend(q, k, v), atol=2e-6)


def test_a_sum_of_products_is_one_product():
    """Text and layout scores, each of its own head size."""

    def attend(q, k, v):
        scores = q @ k.transpose(-1, -2) / 2 + (q[..., :3] @ k[..., :3].transpose(-1, -2)) * 0.7
        return scores.softmax(-1) @ v

    q, k, v = operands()
    with Kernels() as seen, Deferred():
        mine = attend(q, k, v)
    assert (seen.fused, seen.written) == (1, 0)
    assert torch.allclose(mine, attend(q, k, v), atol=2e-6)


def test_blocks_of_products():
    """Words and entities, each with queries of its own for either kind of key, as LUKE has them."""

    def attend(q, k, v):
        few, rest = k[:, :, :3], k[:, :, 3:]
        rows = [
            torch.cat([(a @ few.transpose(-1, -2)), (b @ rest.transpose(-1, -2))], dim=3)
            for a, b in ((q, q * 2), (q[:, :, :2] + 1, q[:, :, :2] - 1))
        ]
        scores = torch.cat(rows, dim=2) / 3
        return scores.softmax(-1) @ v

    q, k, v = operands()
    with Kernels() as seen, Deferred():
        mine = attend(q, k, v)
    assert (seen.fused, seen.written) == (1, 0)
    assert torch.allclose(mine, attend(q, k, v), atol=2e-6)


def test_lengths_below_the_measured_ones_are_stock():
    """Below the length from which the kernel pays, the model's own way is taken."""
    q, k, v = operands()
    with Kernels() as seen, Deferred(K + 1):
        mine = attention([], q, k, v)
    assert (seen.fused, seen.written) == (0, 1)
    assert torch.equal(mine, attention([], q, k, v))


def test_a_learned_bias_in_training_is_stock():
    """The kernels write the scores out for its gradient, so nothing would be gained."""
    learned = bias(1, H, Q, K).requires_grad_()
    _, _, seen = outcome([lambda s: s + learned], deferred=True)
    assert seen.written == 1
    assert learned.grad is not None


def test_a_look_without_gradients_costs_none():
    """A model that looks at its scores under ``no_grad`` still learns through them."""

    def attend(q, k, v):
        scores = q @ k.transpose(-1, -2)
        with torch.no_grad():
            scale = (scores + 1).abs().amax()
        return (scores / scale).softmax(-1) @ v

    stock, mine = operands(), operands()
    attend(*stock).sum().backward()
    with Deferred():
        out = attend(*mine)
    out.sum().backward()
    assert all(apart(a.grad, b.grad) <= 1e-10 for a, b in zip(mine, stock, strict=True))


def test_scores_read_like_a_tensor():
    """Shape, dtype and device need no writing; a value does, and is the stock value."""
    q, k, _ = operands()
    with Deferred():
        scores = q @ k.transpose(-1, -2)
        assert isinstance(scores, Scores)
        assert (scores.shape, scores.size(1), scores.dim(), len(scores)) == ((B, H, Q, K), H, 4, B)
        assert (scores.dtype, scores.device) == (q.dtype, q.device)
        assert scores.real is not None  # len() looked at it
        assert scores.requires_grad
        found = scores[0, 0]
    assert torch.equal(found, (q @ k.transpose(-1, -2))[0, 0])


def test_autocast_is_followed():
    """Under autocast the scores have the dtype that stock's have."""
    q, k, v = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        stock = attention([], q, k, v)
        with Deferred():
            mine = attention([], q, k, v)
            assert (q @ k.transpose(-1, -2)).dtype is torch.bfloat16
    assert mine.dtype is stock.dtype
    assert torch.allclose(mine.float(), stock.float(), atol=3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_keep_their_masks(dtype):
    """A mask made for fp32 does not become infinite, and no row becomes NaN."""
    q, k, v = (t.detach().to(dtype) for t in operands())
    mask = holes(B, 1, Q, K)
    mask[0, :, 1] = True
    with Deferred():
        scores = (q @ k.transpose(-1, -2)).float().masked_fill(mask, LOWEST)
        mine = scores.softmax(-1).to(dtype) @ v
    assert mine.isfinite().all()
    even = v[0].float().mean(-2)
    assert torch.allclose(mine[0, :, 1].float(), even, atol=2e-2)


def test_axes():
    """Views are told apart, and a bias is only spread where a kernel needs it."""
    assert refined((6,), (2, 3)) == (2, 3)
    assert refined((2, 6), (4, 3)) == (2, 2, 3)
    assert refined((4,), (3,)) is None
    assert refined((6, 4), (4, 6)) is None
    assert spread((1, 3), (2, 3), (2, 3)) == (1, 3)
    assert spread((6,), (6,), (2, 3)) == (2, 3)
    assert spread((2,), (3,), (3,)) is None
    assert halves((2, 3), (1, 3)) == (1, (1, 3))
    assert halves((2, 4, 3), (1, 4, 3)) == (1, (1, 4, 3))
    assert halves((2, 4, 3), (2, 1, 3)) == (2, (2, 4, 3))
