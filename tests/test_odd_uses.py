"""Ways to a weight or an answer that go round the module: right, or refused, never wrong."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import FIRST_WORD, LENGTH, PLAIN, WORDS, batch, case, masks
from snapshots import distance, identical, values
from torch import Tensor, nn

import optimus
from optimus.core.errors import SurgeryError
from optimus.core.verify import CLOSE

pytestmark = pytest.mark.usefixtures("one_thread")

ANY, BERT, WINDOWED = case(PLAIN), case("bert"), case("modernbert")
FP32 = CLOSE[torch.float32]


@pytest.fixture
def mine(capable):
    """A transformed perceptron."""
    return optimus.transform(ANY.build(), backend=capable, check=False)


@pytest.fixture
def rows():
    """A batch for it."""
    return batch(ANY.build())["input"]


@pytest.mark.parametrize("compiled", [False, True])
def test_functional_call(compiled, mine, rows):
    """Weights that are passed in are the ones computed with, for that call."""
    stock, other = ANY.build(), ANY.build(seed=1)
    given_weights = dict(other.named_parameters())

    def call(inputs: Tensor) -> Tensor:
        return torch.func.functional_call(mine, given_weights, (inputs,))

    with torch.no_grad():
        called = torch.compile(call, backend="eager") if compiled else call
        assert distance(called(rows), other(rows), None) < FP32
        assert distance(mine(rows), stock(rows), None) < FP32


def test_what_stands_in_the_table(mine, rows):
    """A parameter that stands for a packed one shows NaN, and takes no value that would be lost."""
    weight = dict(mine.named_parameters())["0.weight"]
    assert weight.shape == (512, 256)
    assert bool(weight.isnan().all())
    with pytest.raises(SurgeryError, match=r"would be lost. Set module.weight"):
        weight.data = torch.ones(512, 256)
    with pytest.raises(RuntimeError), torch.no_grad():
        weight.mul_(2)
    flat = torch.nn.utils.parameters_to_vector(ANY.build(seed=1).parameters())
    with pytest.raises(SurgeryError, match="would be lost"):
        torch.nn.utils.vector_to_parameters(flat, mine.parameters())
    assert bool(mine(rows).isfinite().all())


WRITERS = {
    "setattr": lambda m, new: setattr(m, "weight", nn.Parameter(new.clone())),
    "register": lambda m, new: m.register_parameter("weight", nn.Parameter(new.clone())),
    "data": lambda m, new: setattr(m.weight, "data", new.clone()),
    "copy": lambda m, new: m.weight.data.copy_(new),
    "slices": lambda m, new: [m.weight.data[i].copy_(new[i]) for i in range(len(new))],
    "load": lambda m, new: m.load_state_dict({"weight": new, "bias": m.bias}),
    "init": lambda m, new: nn.init.constant_(m.weight, 0.25),
}


@pytest.mark.parametrize("how", WRITERS)
def test_ways_to_write_a_weight(how, mine, rows):
    """Whoever writes into a layer's weight finds it in the answer, and after the reverse."""
    stock, new = ANY.build(), ANY.build(seed=1)[0].weight.detach()
    mine(rows)
    for model in (stock, mine):
        WRITERS[how](model[0], new)
    for _ in range(3):
        assert distance(mine(rows), stock(rows), None) < FP32
    optimus.reverse(mine)
    assert values(mine.state_dict()) == values(stock.state_dict())


def test_a_weight_that_is_held(mine, rows):
    """As long as somebody holds a weight, what he writes later is effective, too."""
    stock = ANY.build()
    held = mine[0].weight
    for factor in (2.0, 0.5, 3.0):
        with torch.no_grad():
            held.mul_(factor)
            stock[0].weight.mul_(factor)
        assert distance(mine(rows), stock(rows), None) < FP32


def test_set_module_tensor(mine, rows):
    """accelerate's way to place a tensor in a module."""
    from accelerate.utils import set_module_tensor_to_device

    stock, value = ANY.build(), ANY.build(seed=1)[0].weight.detach()
    for model in (stock, mine):
        set_module_tensor_to_device(model, "0.weight", "cpu", value=value.clone())
    assert distance(mine(rows), stock(rows), None) < FP32
    optimus.reverse(mine)
    assert values(mine.state_dict()) == values(stock.state_dict())


def test_offloaded_afterwards(mine, rows):
    """A transformed model that accelerate offloads answers right, and goes back."""
    from accelerate import cpu_offload

    stock = ANY.build()
    cpu_offload(mine, execution_device=torch.device("cpu"))
    with torch.no_grad():
        assert distance(mine(rows), stock(rows), None) < FP32
        optimus.reverse(mine)
        assert identical(mine(rows), stock(rows))


def test_reverse_in_inference_mode(capable, rows):
    """A model reversed inside torch.inference_mode can be trained outside of it."""
    model = ANY.build()
    with torch.inference_mode():
        optimus.transform(model, backend=capable, check=False)
        model(rows)
        with torch.autocast("cpu", torch.bfloat16):
            model(rows)
        optimus.reverse(model)
    model.train()(rows).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_threads(capable):
    """Threads that run, read weights and change the path of one model do not disturb each other."""
    stock, mine = BERT.build(), optimus.transform(BERT.build(), backend=capable)
    far: list[float] = []

    def work(number: int) -> None:
        kind = ("right", "hole", "ones", "left")[number]
        with torch.no_grad():
            for turn in range(12):
                apart = distance(mine(**batch(mine, kind)), expected[kind], masks()[kind])
                far.append(apart)
                if turn % 4 == number:
                    mine.encoder.layer[0].output.dense.weight.sum()

    with torch.no_grad():
        expected: dict[str, Any] = {k: stock(**batch(stock, k)) for k in masks() if k != "empty"}
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(far) == 48
    assert max(far) < FP32
    optimus.reverse(mine)
    assert values(mine.state_dict()) == values(stock.state_dict())


def test_nested_tensors(mine):
    """Inputs that are not plain tensors take the stock path."""
    parts = [torch.ones(2, 256), torch.ones(5, 256)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    stock = ANY.build()
    with torch.no_grad():
        for ours, theirs in zip(mine(jagged).unbind(), stock(jagged).unbind(), strict=True):
            assert distance(ours, theirs, None) < FP32


# torch.jit warns that it is old; it is still what people have.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced(mine, rows):
    """A trace holds the stock weights."""
    with torch.no_grad():
        traced = torch.jit.trace(mine, (rows,))
        assert distance(traced(rows), ANY.build()(rows), None) < FP32


@pytest.mark.parametrize("one", [BERT, WINDOWED], ids=str)
def test_any_mask(one, capable):
    """No mask whatsoever makes an unpadded encoder answer differently at a real token."""
    stock, mine = one.build(), optimus.transform(one.build(), backend=capable)
    bits = st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH)
    tokens = torch.arange(FIRST_WORD, WORDS)

    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(st.lists(bits, min_size=1, max_size=4), st.integers(0, 50))
    def holds(drawn: list[list[bool]], first: int) -> None:
        mask = torch.tensor(drawn).long()
        ids = tokens[(torch.arange(mask.numel()).view_as(mask) * 7 + first) % len(tokens)]
        with torch.no_grad():
            answers = [m(input_ids=ids, attention_mask=mask) for m in (mine, stock)]
        assert distance(*answers, mask) < FP32

    holds()
