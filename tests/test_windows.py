"""Windows, blocks and global tokens on the fused kernel: stock answers at more than one block."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import sweep
import torch
import zoo
from snapshots import identical
from torch import Tensor, nn
from zoo.models import build_from

import optimus
from optimus.core.replacement import SHORTEST

pytestmark = pytest.mark.usefixtures("one_thread", "measured")
LENGTH = 50
# Sizes at which there are several windows, and a last one that is not full.
SIZES: dict[str, dict[str, Any]] = {
    "longformer": {"attention_window": [8, 4], "max_position_embeddings": 99},
    "led": {"attention_window": [8, 8], "max_encoder_position_embeddings": 99},
    "big_bird": {"block_size": 4, "num_random_blocks": 3, "max_position_embeddings": 99},
    "bigbird_pegasus": {"block_size": 4, "num_random_blocks": 2, "max_position_embeddings": 99},
    "pegasus_x": {"block_size": 8, "num_global_tokens": 3},
}
MASKS = ("none", "right", "left", "holes", "an empty row")
GLOBALS = ("none", "first", "ragged", "a row without", "all", "masked ones")


@pytest.fixture(name="measured")
def _measured():
    """Every row pays at every length."""
    with sweep.measured_everywhere():
        yield


def pair(model_type: str, backend: optimus.Backend) -> tuple[nn.Module, nn.Module]:
    """A small model, and a transformed copy."""
    config = sweep.changed(zoo.tiny(model_type), SIZES[model_type])
    stock = build_from(config, zoo.heads(model_type)[0], None, torch.float32, 0)
    recipe = optimus.Recipe("row", ((f"{model_type}.attention.windows",),))
    return stock, sweep.transformed(stock, recipe, backend)


def masked(kind: str) -> Tensor:
    """Ones where there is something, in three rows."""
    places = torch.arange(LENGTH).expand(3, LENGTH)
    lengths = torch.tensor([[LENGTH], [19], [33]])
    if kind == "holes":
        return ((places * 7 + lengths) % 5 != 0).long()
    mask = torch.ones_like(places) if kind == "none" else (places < lengths).long()
    if kind == "an empty row":
        mask[1] = 0
    return mask.flip(1) if kind == "left" else mask


def everywhere(kind: str, mask: Tensor) -> Tensor:
    """Ones for global tokens."""
    found = torch.zeros_like(mask)
    if kind == "first":
        found[:, 0] = 1
    if kind in ("ragged", "a row without", "masked ones"):
        found[0, [2, 3, 17]] = found[1, 5] = found[2, 11:24] = 1
    if kind == "a row without":
        found[1] = 0
    if kind == "all":
        found[:] = 1
    return found if kind == "masked ones" else found * mask


def given(stock: nn.Module, mask: Tensor, **more: Any) -> dict[str, Any]:
    """Ids and masks."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(8, 90, mask.shape, generator=draw)
    inputs = {"input_ids": ids, "attention_mask": mask, **more}
    if stock.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :6]
    return inputs


def assert_fused(stock: nn.Module, mine: nn.Module, inputs: dict[str, Any]) -> None:
    """The stock answer, and no scores of a claimed class."""
    expected = sweep.answer(stock, inputs)
    found, seen = sweep.watched(mine, inputs)
    assert sweep.error(found, expected, stock, inputs) <= sweep.CLOSE
    assert not [path for path in seen.written if sweep.claimed(mine) & set(path)]
    assert seen.fused > 0


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("model_type", SIZES)
def test_masks(model_type: str, kind: str, capable):
    """Padded, with holes, and a row without any word."""
    stock, mine = pair(model_type, capable)
    assert_fused(stock, mine, given(stock, masked(kind)))


@pytest.mark.parametrize("tokens", GLOBALS)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("model_type", ["longformer", "led"])
def test_global_tokens(model_type: str, kind: str, tokens: str, capable):
    """As many in every row or not, none at all, and where there is nothing."""
    stock, mine = pair(model_type, capable)
    mask = masked(kind)
    inputs = given(stock, mask, global_attention_mask=everywhere(tokens, mask))
    assert_fused(stock, mine, inputs)


@pytest.mark.parametrize("model_type", SIZES)
def test_stock_where_it_must_be(model_type: str, capable):
    """Weights, gradients, dropout, autocast, a watched part and short windows, to the last bit."""
    stock, mine = pair(model_type, capable)
    inputs = given(stock, masked("right"))
    asked = {"output_attentions": True}
    assert identical(sweep.answer(mine, inputs, **asked), sweep.answer(stock, inputs, **asked))
    assert identical(mine(**inputs), stock(**inputs))
    # BigBird's own does not run so.
    if "big" not in model_type:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert identical(mine(**inputs), stock(**inputs))
    sites = [m for m in mine.modules() if type(m).__qualname__ in sweep.claimed(mine)]
    for site in sites:
        vars(site)[SHORTEST] = site.extent(*[torch.zeros(1, 99, 1)] * 2) + 1
    assert identical(sweep.answer(mine, inputs), sweep.answer(stock, inputs))


@pytest.mark.parametrize("model_type", ["big_bird", "bigbird_pegasus"])
def test_short_texts(model_type: str, capable):
    """BigBird turns to full attention at the first short text; then it is reversed all the same."""
    stock, mine = pair(model_type, capable)
    inputs = {k: v[:, :9] if v.shape[1] > 9 else v for k, v in given(stock, masked("none")).items()}
    assert identical(sweep.answer(mine, inputs), sweep.answer(stock, inputs))
    assert optimus.is_transformed(mine)
    optimus.reverse(mine)
    assert [type(m) for m in mine.modules()] == [type(m) for m in stock.modules()]


def test_masks_between_zero_and_one(capable):
    """BigBird weighs keys by such masks; that is left to it."""
    stock, mine = pair("big_bird", capable)
    inputs = given(stock, masked("right") * 0.5)
    assert identical(sweep.answer(mine, inputs), sweep.answer(stock, inputs))


def test_signature(capable):
    """Of the original, although the forward is shared."""
    stock, mine = pair("longformer", capable)
    sites = (model.encoder.layer[0].attention.self for model in (stock, mine))
    assert len({str(inspect.signature(site.forward)) for site in sites}) == 1
