"""Every registered row of attention alone, on a tiny model of its type: claimed, fused, and right."""

from __future__ import annotations

import pytest
import sweep
from snapshots import identical
from sweep import CLOSE, NOT_SCORES, PADDINGS, Row

import optimus
from optimus.core import costs

pytestmark = pytest.mark.usefixtures("one_thread", "measured_everywhere")

ROWS = sweep.rows()
CALLS = [("none", 1), *((padding, 3) for padding in PADDINGS)]
# What a row leaves written, and why it cannot be otherwise.


@pytest.fixture(name="measured_everywhere")
def _measured_everywhere(monkeypatch):
    """Every row pays at every length."""
    table = sweep.pays_everywhere()
    monkeypatch.setattr(costs, "_table", lambda: table)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_row(row: Row, capable):
    """Padded or not, one sequence or three: stock answers, from fused kernels; and reversed."""
    stock = row.build()
    mine = sweep.transformed(stock, row.recipe, capable)
    claimed = sweep.claimed(mine)
    far, left, more = {}, set(), 0
    for padding, batch in CALLS:
        given = row.inputs(stock, batch, padding)
        expected, before = sweep.watched(stock, given)
        found, after = sweep.watched(mine, given)
        far[padding, batch] = sweep.apart(found, expected, sweep.mask_of(given))
        left |= {path for path in after.written if claimed & set(path)}
        more += after.fused - (before.fused if row.moves else 0)
    assert {key: value for key, value in far.items() if value > CLOSE} == {}
    assert {path[0] for path in left} <= NOT_SCORES.keys()
    assert more > 0
    optimus.reverse(mine)
    assert [type(m) for m in mine.modules()] == [type(m) for m in stock.modules()]
    assert identical(sweep.answer(mine, given), expected)


WEIGHING = [row for row in ROWS if row.gives_weights]


@pytest.mark.parametrize("row", WEIGHING, ids=str)
def test_weights_asked_for_are_the_stock_ones(row: Row, capable):
    """``output_attentions=True``: the same weights, to the bit."""
    stock = row.build()
    mine = sweep.transformed(stock, row.recipe, capable)
    given = row.inputs(stock, 3, "right")
    expected = sweep.answer(stock, given, output_attentions=True)
    assert identical(sweep.answer(mine, given, output_attentions=True), expected)
