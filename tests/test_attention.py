"""Our own kernel of attention: what SDPA says, to the last bits, or no answer at all."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from optimus.ops import native
from optimus.ops.attention import MOST_KEYS, attention, within

LIMIT = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}


def _tensors(
    shape: tuple[int, ...] = (2, 4, 4, 37, 53, 32, 32), dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as projections leave them: heads within tokens."""
    batch, heads, groups, rows, keys, dim, wide = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((rows, heads, dim), (keys, groups, dim), (keys, groups, wide))
    q, k, v = (torch.randn(batch, *size, generator=generator).to(dtype) for size in sizes)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _reference(
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    cap: float = 0.0,
) -> Tensor:
    """The formula, in double precision: ``[batch, rows, heads, wide]``."""
    q, k, v = (one.double() for one in tensors)
    share = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(share, 1) for one in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = cap * (scores / cap).tanh() if cap else scores
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), -math.inf)
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask.double()
    return (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2)


def _agrees(out: Tensor | None, right: Tensor, dtype: torch.dtype) -> bool:
    """Close to the formula; where there is no kernel, no answer."""
    if not native.steps():
        return out is None
    assert out is not None
    assert out.dtype is dtype
    return float((out.double() - right).norm() / right.norm()) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 8, 1, 16, 16),
        (3, 4, 4, 37, 53, 32, 32),
        (2, 6, 2, 64, 64, 64, 64),
        (1, 8, 1, 25, 130, 80, 48),
        (2, 2, 2, 50, 17, 128, 192),
    ],
)
def test_shapes(shape, causal, dtype, threads) -> None:
    """Every remainder of rows, keys and dims; shared keys; values of another width."""
    tensors = _tensors(shape, dtype)
    out = attention(*tensors, causal=causal)
    assert _agrees(out, _reference(tensors, causal=causal), dtype)


def _masks() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    chosen = torch.rand(2, 4, 37, 53, generator=generator) > 0.4
    lowest = torch.finfo(torch.float32).min
    return {
        "keys": chosen[:, :1, :1],
        "rows": chosen[:1, :1],
        "heads": chosen[:1],
        "all": chosen,
        "added": torch.randn(2, 4, 37, 53, generator=generator),
        "lowest": torch.zeros(2, 1, 37, 53).masked_fill(~chosen[:, :1], lowest),
        "infinite": torch.zeros(1, 4, 37, 53).masked_fill(~chosen[:1], -math.inf),
        "half": torch.randn(1, 1, 37, 53, generator=generator).bfloat16(),
        "expanded": torch.randn(1, 1, 37, 53, generator=generator).expand(2, 4, 37, 53),
    }


@pytest.mark.parametrize("name", _masks())
def test_masks(name) -> None:
    """Chosen or added, and shared along any axis."""
    tensors, mask = _tensors(), _masks()[name]
    assert _agrees(attention(*tensors, mask=mask), _reference(tensors, mask), torch.float32)


def test_rows_without_keys_are_zero() -> None:
    """As SDPA's; of the lowest number, which is finite, every key weighs the same."""
    tensors = _tensors()
    mask = torch.ones(2, 1, 37, 53, dtype=torch.bool)
    mask[0, 0, 5] = False
    assert _agrees(attention(*tensors, mask=mask), _reference(tensors, mask), torch.float32)
    low = torch.zeros(2, 1, 37, 53).masked_fill(~mask, torch.finfo(torch.float32).min)
    mean = _reference(tensors, low)
    assert _agrees(attention(*tensors, mask=low), mean, torch.float32)
    assert not torch.equal(mean[0, 5], torch.zeros_like(mean[0, 5]))


@pytest.mark.parametrize("cap", [0.5, 5.0, 50.0])
def test_soft_cap(cap) -> None:
    """Before the mask, as Gemma 2 has it."""
    tensors, mask = _tensors(), _masks()["lowest"]
    out = attention(*tensors, mask=mask, cap=cap)
    assert _agrees(out, _reference(tensors, mask, cap=cap), torch.float32)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_a_number_stays_with_its_row(value) -> None:
    """It spoils the rows that see it, and no other."""
    q, k, v = _tensors()
    out = attention(q, k, v)
    q[1, 2, 7, 3] = value
    spoilt = attention(q, k, v)
    if out is None or spoilt is None:
        assert not native.steps()
        return
    assert spoilt[1, 7, 2].isnan().all()
    spoilt[1, 7, 2] = out[1, 7, 2]
    assert torch.equal(out, spoilt)


def test_end_to_end_is_each_by_itself() -> None:
    """Sequences that lie end to end give the bits that they give alone."""
    if not native.steps():
        return
    lengths = (5, 1, 70, 33)
    q, k, v = _tensors((1, 4, 2, sum(lengths), sum(lengths), 32, 32))
    out = within(q, k, v, lengths, causal=True, scale=None)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = tuple(one[:, :, part] for one in (q, k, v))
        assert _agrees(out[:, part], _reference(alone, causal=True), torch.float32)
        if length >= 8:
            assert torch.equal(out[:, part], attention(*alone, causal=True))
        start += length


@pytest.mark.parametrize("case", ["dim", "keys", "rows", "double", "gradient", "mixed", "batch"])
def test_what_it_leaves_to_others(case) -> None:
    """Widths it has no registers for, long keys, single rows, gradients, dtypes that differ."""
    q, k, v = _tensors()
    if case == "dim":
        q, k, v = (one[..., :20] for one in (q, k, v))
    if case == "keys":
        q, k, v = _tensors((1, 1, 1, 8, MOST_KEYS + 1, 16, 16))
    if case == "rows":
        q = q[:, :, :1]
    if case == "double":
        q, k, v = q.double(), k.double(), v.double()
    if case == "gradient":
        v = v.requires_grad_()
    if case == "mixed":
        k = k.bfloat16()
    if case == "batch":
        k, v = k[:1], v[:1]
    assert attention(q, k, v) is None
