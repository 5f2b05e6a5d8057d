"""The drop-in for optimum's class."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimus
from optimus.bettertransformer import BetterTransformer


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Embedding(50_000, 256), nn.Linear(256, 512), nn.Linear(512, 256))
    return nn.Sequential(*layers).eval()


@pytest.fixture
def options(capable: Any) -> dict[str, Any]:
    """What a plain module needs to be verified."""
    return {"backend": capable, "sample": {"input": torch.tensor([[1, 2], [3, 4]])}}


def _bytes(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_signatures() -> None:
    """A user of optimum changes the import and nothing else."""
    old = ["model", "keep_original_model", "max_memory", "offload_dir", "kwargs"]
    assert list(inspect.signature(BetterTransformer.transform).parameters) == old
    assert list(inspect.signature(BetterTransformer.reverse).parameters) == ["bt_model"]


def test_in_place_and_back(options: dict[str, Any]) -> None:
    """Without ``keep_original_model`` it is ``optimus.transform``."""
    model = _model()
    assert BetterTransformer.transform(model, **options) is model
    assert optimus.is_transformed(model)
    assert not optimus.is_transformed(BetterTransformer.reverse(model))


def test_the_original_is_kept_apart(options: dict[str, Any]) -> None:
    """The copy is transformed, the original is not, and a write to one is not seen by the other."""
    model = _model()
    before = _bytes(model)
    copied = BetterTransformer.transform(model, keep_original_model=True, **options)
    assert (optimus.is_transformed(model), optimus.is_transformed(copied)) == (False, True)
    with torch.no_grad():
        copied[0].weight.mul_(2.0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(copied[0].weight, before["0.weight"] * 2)


def test_storage_that_nobody_writes_is_shared(options: dict[str, Any]) -> None:
    """The embedding is one piece of memory until one of the two models writes to it."""
    model = _model()
    copied = BetterTransformer.transform(model, keep_original_model=True, **options)
    tables = [torch._C._is_cow_tensor(m[0].weight) for m in (model, copied)]
    assert tables == [True, True]
    assert torch._C._data_address(model[0].weight) == torch._C._data_address(copied[0].weight)


def test_storage_from_a_checkpoint_is_shared(options: dict[str, Any], tmp_path: Any) -> None:
    """Also where a checkpoint reader owns the memory, which torch cannot share on write."""
    from safetensors.torch import load_file, save_file

    save_file(_bytes(_model()), tmp_path / "model.safetensors")
    model = _model()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    before = _bytes(model)
    copied = BetterTransformer.transform(model, keep_original_model=True, **options)
    assert torch._C._is_cow_tensor(copied[0].weight)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_has_no_effect_says_so(options: dict[str, Any]) -> None:
    """Arguments that the old design needed are answered with a warning."""
    with pytest.warns(UserWarning, match="nothing to dispatch"):
        BetterTransformer.transform(_model(), max_memory={"cpu": "1GB"}, **options)
