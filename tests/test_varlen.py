"""Packed tokens: no sequence sees another, and padding costs and changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from optimus.ops.varlen import Ragged, Sequences, varlen_attention

LENGTHS = (5, 1, 7, 3)
AT = torch.cat([torch.arange(n) for n in LENGTHS])


def _mask() -> Tensor:
    return (torch.arange(7) < torch.tensor(LENGTHS)[:, None]).long()


def _tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, sum(LENGTHS), 8, generator=generator) for _ in range(3)]


def test_pack_and_unpack_are_inverses() -> None:
    """Real entries survive the round trip; the others come back as zero."""
    ragged = Ragged(_mask())
    padded = torch.randn(4, 7, 3)
    again = ragged.unpack(ragged.pack(padded))
    assert torch.equal(again, padded * _mask()[..., None])


def test_holes_are_padding_too() -> None:
    """Padding in the middle of a row is left out like any other."""
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    ragged = Ragged(mask)
    assert ragged.lengths == [2, 2]
    assert ragged.pack(torch.arange(6).view(2, 3)).tolist() == [[0, 2, 3, 4]]


def test_no_sequence_sees_another() -> None:
    """Other values in one sequence change no bit of any other's output."""
    sequences, (q, k, v) = Sequences(LENGTHS, AT), _tensors()
    before = varlen_attention(q, k, v, sequences, scale=None, window=None)
    for tensor in (q, k, v):
        tensor[:, :, 6:13] += 100.0
    after = varlen_attention(q, k, v, sequences, scale=None, window=None)
    assert torch.equal(before[:, :6], after[:, :6])
    assert torch.equal(before[:, 13:], after[:, 13:])
    assert not torch.equal(before[:, 6:13], after[:, 6:13])


@pytest.mark.parametrize("window", [None, 0, 2, 6, 100])
def test_against_one_masked_call(window: int | None) -> None:
    """The same as one attention over all tokens under a block-diagonal, banded mask."""
    sequences, (q, k, v) = Sequences(LENGTHS, AT), _tensors()
    owner = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    allowed = owner[:, None] == owner
    if window is not None:
        allowed &= (AT[:, None] - AT).abs() <= window
    wanted = scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=0.5).transpose(1, 2)
    mine = varlen_attention(q, k, v, sequences, scale=0.5, window=window)
    torch.testing.assert_close(mine, wanted)


def test_pieces_are_whole_sequences() -> None:
    """As many sequences as fit; one that is longer than a piece is a piece of its own."""
    ragged = Ragged(_mask())
    pieces = [(part.start, part.stop, s.lengths) for part, s in ragged.pieces(6)]
    assert pieces == [(0, 6, (5, 1)), (6, 13, (7,)), (13, 16, (3,))]
    assert [s.lengths for _, s in ragged.pieces(100)] == [LENGTHS]


def test_a_window_counts_places_and_not_tokens() -> None:
    """A hole in a row is as wide for the window as it was in the padded batch."""
    ((_, sequences),) = Ragged(torch.tensor([[1, 0, 0, 1, 1]])).pieces(100)
    near = sequences.band(0, 3, 2)
    assert near is not None
    assert near.tolist() == [[True, False, False], [False, True, True], [False, True, True]]
    assert sequences.band(0, 3, 4) is None
