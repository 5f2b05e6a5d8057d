"""All or nothing: whatever goes wrong on the way, the model is as it was, bit for bit."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from models import PLAIN, Case, batch, case
from snapshots import distance, identical, snapshot
from torch import Tensor, nn

import optimus
from optimus.core.errors import (
    IrreversibleError,
    NothingToDoError,
    PlanError,
    Refusal,
    VerificationError,
)
from optimus.core.registry import Registry
from optimus.core.replacement import Architecture, Mixin, Replacement
from optimus.replacements import _linear

pytestmark = pytest.mark.usefixtures("one_thread")

BERT = case("bert")
HOME = Path(optimus.__file__).parent


@contextmanager
def interrupt_at(count: int, error: type[BaseException]) -> Iterator[list[int]]:
    """Raise once, at the ``count``-th line of optimus that runs; yields the lines so far."""
    lines = [0]

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            lines[0] += 1
            if lines[0] == count:
                sys.settrace(None)
                raise error("in the middle")
        return local

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        inside = frame.f_code.co_filename.startswith(str(HOME)) and lines[0] < count
        return local if inside else None

    before, grad = sys.gettrace(), torch.is_grad_enabled()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)
        # An interrupt between the end of a ``with no_grad()`` and its exit leaves the mode off.
        torch.set_grad_enabled(grad)


NEVER = 10**9
REGISTERED = [a for a in Registry.installed().architectures if a.tiny is not None]


@pytest.mark.parametrize("recipe", ["auto", "bf16"])
@pytest.mark.parametrize(("name", "moments"), [("bert", 90), (PLAIN, 500)])
def test_interrupt_anywhere(name, moments, recipe, capable):
    """Ctrl-C at any moment of a transform leaves the stock model; in its last lines, when all is
    done and checked, a model that can be reversed.
    """
    model = case(name).build()
    before = snapshot(model)
    for _ in range(2):  # the second run finds every class made and takes fewer lines
        with interrupt_at(NEVER, KeyboardInterrupt) as lines:
            optimus.transform(model, recipe, backend=capable, check=False)
        optimus.reverse(model)
    late = 0
    for count in range(lines[0], 0, -max(1, lines[0] // moments)):
        with (
            pytest.raises(KeyboardInterrupt),
            interrupt_at(count, KeyboardInterrupt),
        ):
            optimus.transform(model, recipe, backend=capable, check=False)
        if optimus.is_transformed(model):
            late += 1
            optimus.reverse(model)
        assert snapshot(model) == before, count
    assert late <= 5


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 4, 12])
def test_packing_that_fails(call, error, capable, monkeypatch):
    """The first, a middle and a late weight that cannot be packed."""
    model = BERT.build()
    before = snapshot(model)
    seen = []

    def failing(weight: Tensor) -> Any:
        seen.append(weight)
        if len(seen) == call:
            raise error("no room")
        return packed(weight)

    packed = _linear.PackedWeight
    monkeypatch.setattr(_linear, "PackedWeight", failing)
    with pytest.raises(error):
        optimus.transform(model, backend=capable)
    assert len(seen) == call
    assert snapshot(model) == before


def test_interrupt_of_the_check(capable, monkeypatch):
    """Ctrl-C while the transformed model runs its probe puts it back."""
    model = BERT.build()
    before = snapshot(model)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(_linear.PackedWeight, "matmul", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimus.transform(model, backend=capable)
    assert snapshot(model) == before


def test_interrupt_of_a_reverse(capable):
    """After Ctrl-C in the middle of a reverse, another reverse ends what was begun."""
    model = BERT.build()
    before = snapshot(model)
    with interrupt_at(NEVER, KeyboardInterrupt) as lines:
        optimus.reverse(optimus.transform(model, backend=capable, check=False))
    for count in range(1, lines[0], max(1, lines[0] // 50)):
        optimus.transform(model, backend=capable, check=False)
        try:
            with interrupt_at(count, KeyboardInterrupt):
                optimus.reverse(model)
        except KeyboardInterrupt:
            if optimus.is_transformed(model):
                optimus.reverse(model)
        assert snapshot(model) == before, count


BROKEN = "encoder.layer.1.output.dense"


class Wrong(Mixin):
    """A linear layer that is off by one per cent."""

    @classmethod
    def accepts(cls, site: Any, context: Any) -> Refusal | None:
        """One site, in the middle of the model."""
        return None if site.path == BROKEN else Refusal("not this one")

    def forward(self, input: Tensor) -> Tensor:
        """The right answer, and a little more."""
        return super().forward(input) * 1.01


def test_wrong_numbers_are_blamed(capable):
    """The site that computes wrongly is named first, and the model is put back."""
    target = ("torch.nn.modules.linear:Linear",)
    rule = Replacement(name="wrong.linear.scaled", targets=target, mixin=Wrong)
    registry = Registry([Architecture(model_type="wrong", replacements=(rule,), tiny=dict)])
    model = BERT.build()
    before = snapshot(model)
    with pytest.raises(VerificationError, match=f"{BROKEN}.*put back") as caught:
        optimus.transform(model, backend=capable, registry=registry)
    verdict = caught.value.verdict
    assert (verdict.sites[0][0], verdict.ok) == (BROKEN, False)
    assert verdict.worst > verdict.tolerance
    assert snapshot(model) == before
    assert not optimus.is_transformed(model)


def test_error_inside_transformed(capable):
    """The block's own exception comes out, and the model goes back."""
    model = BERT.build()
    before = snapshot(model)

    def use() -> None:
        with optimus.transformed(model, backend=capable):
            assert optimus.is_transformed(model)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert snapshot(model) == before


@pytest.mark.parametrize("recipe", ["auto", "bf16"])
@pytest.mark.parametrize("registered", REGISTERED, ids=lambda a: a.model_type)
def test_plan_round_trip(registered, recipe, capable):
    """A plan survives JSON, and carries out what it says."""
    one = Case(registered, registered.heads[0])
    made = optimus.plan(one.build(), recipe, backend=capable)
    again = optimus.Plan.from_json(made.to_json())
    assert again == made
    assert str(again) == str(made)
    model, other = one.build(), one.build()
    assert optimus.apply(model, again) is model
    optimus.transform(other, recipe, backend=capable, check=False)
    answers = [m(**batch(m)) for m in (model, other)]
    assert identical(*answers)
    assert optimus.apply(model, made) is model
    # The root's name also tells of the originals that a lossy recipe keeps.
    claims = {claim.path: claim.after for claim in made.claims if claim.path}
    assert {p: m._get_name() for p, m in model.named_modules() if p in claims} == claims


@pytest.mark.parametrize("registered", REGISTERED, ids=lambda a: a.model_type)
def test_plan_without_weights(registered, capable):
    """A plan made from a config alone is the plan of the real model."""
    one = Case(registered, registered.heads[0])
    model = one.build()
    made = optimus.plan(model, backend=capable)
    assert optimus.plan(model.to("meta"), backend=capable) == made


class Saved(NamedTuple):
    """A model loaded from a folder, and its one file of weights."""

    model: nn.Module
    file: Path


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """A BERT that came from a checkpoint."""
    from transformers import AutoModel

    BERT.build().save_pretrained(tmp_path)
    return Saved(AutoModel.from_pretrained(tmp_path).eval(), tmp_path / "model.safetensors")


def test_full_disk(saved, capable, monkeypatch):
    """Originals that do not fit are refused before anything is changed or written."""
    usage = shutil.disk_usage(saved.file)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    before = snapshot(saved.model)
    with pytest.raises(OSError, match=r"keep='disk' needs [\d,]+ bytes .* which has 1,000"):
        optimus.transform(saved.model, "bf16", backend=capable, keep="disk")
    assert snapshot(saved.model) == before


@pytest.mark.parametrize("damage", ["changed", "truncated", "gone"])
def test_lost_source(damage, saved, capable):
    """A checkpoint that is no longer what it was: the error says so and the model works on."""
    model, whole = saved.model, saved.file.read_bytes()
    before = snapshot(model)
    optimus.transform(model, "bf16", backend=capable, keep="source")
    answer = model(**batch(model))
    broken = {"changed": whole[:-8] + b"8 bytes!", "truncated": whole[:-8]}
    if damage == "gone":
        saved.file.unlink()
    else:
        saved.file.write_bytes(broken[damage])
    with pytest.raises(IrreversibleError, match=r"has changed|cannot be read back"):
        optimus.reverse(model)
    assert optimus.is_transformed(model)
    assert identical(model(**batch(model)), answer)
    saved.file.write_bytes(whole)
    optimus.reverse(model)
    assert snapshot(model) == before


def test_source_that_is_none(saved, capable):
    """A model that came from nowhere, or was trained since, cannot be kept in its source."""
    with pytest.raises(PlanError, match="keep='source' needs a model loaded from a folder"):
        optimus.transform(BERT.build(), "bf16", backend=capable, keep="source")
    with torch.no_grad():
        saved.model.pooler.dense.weight.add_(1)
    before = snapshot(saved.model)
    with pytest.raises(PlanError, match=r"pooler.dense.weight .* is not what the model holds"):
        optimus.transform(saved.model, "bf16", backend=capable, keep="source")
    assert snapshot(saved.model) == before


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    rendezvous = f"file://{tmp_path / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_sharded(capable):
    """Sharded weights are left alone; what owns none may still be swapped; casting is refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    stock, model = BERT.build(), BERT.build()
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    made = optimus.plan(model, backend=capable)
    assert [claim.replacement for claim in made.claims] == ["bert.encoder.unpadded"]
    optimus.transform(model, backend=capable)
    assert isinstance(model, FSDPModule)
    mask = batch(stock)["attention_mask"]
    with torch.no_grad():
        assert distance(model(**batch(model)), stock(**batch(stock)), mask) < 1e-5
    optimus.reverse(model)
    # A forward leaves the root's weights gathered: they look like any others, and are not.
    made = optimus.plan(model, backend=capable)
    assert [claim.replacement for claim in made.claims] == ["bert.encoder.unpadded"]
    with pytest.raises(NothingToDoError, match="the model is sharded; cast it first"):
        optimus.transform(model, "bf16", backend=capable)


@pytest.mark.usefixtures("world")
def test_sharded_tensors(capable):
    """Tensor parallelism shards without a wrapper: the parameter itself tells."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model, mesh = case(PLAIN).build(), init_device_mesh("cpu", (1,))
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    made = optimus.plan(model, backend=capable)
    assert [claim.path for claim in made.claims] == ["2"]
    why = {path: why.reason for path, _, why in made.refusals}["0"]
    assert why == "its weights are sharded; transform first, then shard"
    with pytest.raises(NothingToDoError, match="the model is sharded; cast it first"):
        optimus.transform(model, "bf16", backend=capable)
