"""Every row of attention alone, on a tiny model of its type: claimed, fused, and right."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import support
import sweep
from snapshots import identical
from sweep import CLOSE, NOT_SCORES, PADDINGS, Row
from torch import nn

import optimus

pytestmark = [
    pytest.mark.usefixtures("one_thread", "measured_everywhere"),
    # WavLM's own.
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning"),
]

ROWS = sweep.rows()
# Attention of the claimed models that is another row's, or refused.
STAYS = {
    "inkling.attention.grouped": ["InklingAttention"],
    "longt5.attention.fused": ["LongT5LocalAttention"],
}


@pytest.fixture(name="measured_everywhere")
def _measured_everywhere():
    """Every row pays at every length."""
    with sweep.measured_everywhere():
        yield


def calls(row: Row, stock: nn.Module) -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
    """One sequence, and three with every padding if there is such a thing as padding."""
    alone = row.inputs(stock, 1, "none")
    yield ("none", 1), alone
    padded = row.inputs(stock, 3, "right")
    masked = any("mask" in name for name in padded)
    for padding in PADDINGS if masked else ("none",):
        yield (padding, 3), row.inputs(stock, 3, padding)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_row(row: Row, capable):
    """Padded or not, one sequence or three: stock answers, from fused kernels; and reversed."""
    stock = row.build()
    mine = sweep.transformed(stock, row.recipe, capable)
    claimed = sweep.claimed(mine)
    far, left, more = {}, set(), 0
    for (padding, batch), given in calls(row, stock):
        expected, before = sweep.watched(stock, given)
        found, after = sweep.watched(mine, given)
        far[padding, batch] = sweep.error(found, expected, stock, given)
        # While the dispatcher is watched, our own kernels leave the call to the host's.
        unseen = sweep.answer(mine, given)
        far[padding, batch, "unseen"] = sweep.error(unseen, expected, stock, given)
        left |= {path for path in after.written if claimed & set(path)}
        more += after.fused - (before.fused if row.moves else 0)
    assert {key: value for key, value in far.items() if value > CLOSE} == {}
    assert {path[0] for path in left} - NOT_SCORES.keys() == set(STAYS.get(row.name, ()))
    assert more > 0
    optimus.reverse(mine)
    assert [type(m) for m in mine.modules()] == [type(m) for m in stock.modules()]
    assert identical(sweep.answer(mine, given), expected)


WEIGHING = [row for row in ROWS if row.gives_weights]


@pytest.mark.parametrize("row", WEIGHING, ids=str)
def test_weights_asked_for_are_the_stock_ones(row: Row, capable):
    """``output_attentions=True``: the same weights in the same places."""
    stock = row.build()
    mine = sweep.transformed(stock, row.recipe, capable)
    given = row.inputs(stock, 3, "right")
    expected = sweep.answer(stock, given, output_attentions=True)
    found = sweep.answer(mine, given, output_attentions=True)
    assert sweep.apart(found, expected, sweep.mask_of(given)) <= CLOSE


@pytest.mark.parametrize("row", sweep.refused(), ids=lambda row: row.name)
def test_refused_classes_exist(row):
    """A refusal names classes that transformers has: under another name they would be silent."""
    for target in row.targets:
        module, _, name = target.partition(":")
        assert hasattr(importlib.import_module(module), name)


def test_every_row_is_in_the_readme():
    """The support table lists the type of every row, under its own name or that of its whole."""
    listed = set(re.findall(r"[\w-]+", support.readme()))
    missing = {sweep.WITHIN.get(row.model_type, row.model_type) for row in sweep.rows()} - listed
    assert missing == set()
