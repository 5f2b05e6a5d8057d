"""CUDA without a GPU: rounded layers and packed attention on doubles, passes on another compiler.

What torch has for the CPU, too (fp8 products, the formula of 8 bits), is torch's own here.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from gpu import GPU, four_bit_tiles, pack, unpack
from models import batch, case
from snapshots import distance, snapshot, values
from torch import Tensor, nn
from uses import bump, claims, compiled, generated

import optimus
from optimus.core import originals
from optimus.core.backend import cuda_features
from optimus.core.errors import BackendUnavailableError, NothingToDoError
from optimus.core.registry import Registry
from optimus.core.verify import LOSSY
from optimus.ops import quantized, rounding
from optimus.ops.weights import Fp8Weight, Int4Weight, Int4WeightG64, Int8Weight, made_of
from optimus.replacements import gpu as rows

pytestmark = pytest.mark.usefixtures("one_thread", "tiles")
CAUSAL = "AutoModelForCausalLM"
RECIPES = ("int8", "int4", "fp8")
LAYOUTS = (Int8Weight, Int4Weight, Int4WeightG64, Fp8Weight)
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def tiles():
    """The operators of 4 bits."""
    with four_bit_tiles():
        yield


def linear(width: int = 256, *, dtype: torch.dtype = BF16, bias: bool = True) -> nn.Sequential:
    """One layer, large enough to round."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 512, bias=bias)).eval().to(dtype)


def rounded(model: nn.Module, recipe: str, **options: object) -> nn.Module:
    """Transformed for the double."""
    return optimus.transform(model, recipe, backend=GPU, check=False, **options)


def without(*features: str) -> optimus.Backend:
    """A lesser GPU."""
    return dataclasses.replace(GPU, features=GPU.features.difference(features))


def weight(rows: int = 512, width: int = 256) -> Tensor:
    """Of a linear layer, in bf16."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).to(BF16)


def test_the_double_packs_as_the_kernel_does():
    """A word of a lane, as torch's kernel puts it together, and back."""
    pairs = torch.randint(0, 256, (16, 128), dtype=torch.uint8)
    words = pack(pairs, 8)
    assert words.shape == (2, 2, 32, 4)
    made = torch.ops.aten._convert_weight_to_int4pack(pairs.to("meta"), 8)
    assert (made.shape, made.dtype) == (words.shape, words.dtype)
    tile, run, lane, word = 1, 1, 13, 2
    row, base = 8 * tile + lane // 4, (8 * run + 2 * word) * 8
    four = [int(pairs[row, base + k]) for k in (1, 5, 9, 13)]
    wanted = sum((v >> 4) << (4 * i) | (v & 15) << (4 * i + 16) for i, v in enumerate(four))
    assert int(words[tile, run, lane, word]) % (1 << 32) == wanted
    codes = unpack(words)
    assert torch.equal(codes[:, ::2], (pairs >> 4).long())
    assert torch.equal(codes[:, 1::2], (pairs & 15).long())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products(layout):
    """The product is that of the dense weight that the layout stands for; bias, any shape."""
    made, bias = made_of(layout, weight(), None), torch.randn(512).to(BF16)
    dense = made.dense()
    assert (dense.shape, dense.dtype, made.in_features) == ((512, 256), BF16, 256)
    # Rows of activations are rounded to e4m3, too.
    near = 3e-2 if layout is Fp8Weight else 5e-3
    for shape in ((1, 256), (2, 3, 256)):
        x = torch.randn(*shape).to(BF16)
        expected = torch.nn.functional.linear(x.float(), dense.float(), bias.float())
        assert distance(made.matmul(x, bias).float(), expected, None) < near


def test_codes_are_those_of_the_cpu():
    """4 bits are rounded alike everywhere: symmetric, with the scale that fits best."""
    mine = made_of(Int4Weight, weight(), None).dense().float()
    theirs = quantized.QuantizedWeight(weight(), quantized.INT4).dense().float()
    assert torch.equal(mine, theirs)
    worth = torch.linspace(0.1, 9, 256)
    theirs = quantized.QuantizedWeight(weight(), quantized.INT4, worth).dense().float()
    assert torch.equal(made_of(Int4Weight, weight(), worth).dense().float(), theirs)


def test_eight_bits_keep_half_a_step():
    """One scale a channel, and nothing is cut off at the ends."""
    plain = weight().float()
    made = made_of(Int8Weight, plain, None)
    step = plain.abs().amax(1, keepdim=True) / 127
    assert ((made.dense() - plain).abs() <= 0.51 * step).all()
    assert made.codes.dtype is torch.int8


def test_rows_without_numbers():
    """A row of the input with NaN or infinity is NaN; zeros and huge numbers stay what they are."""
    made = made_of(Fp8Weight, weight(), None)
    x = torch.randn(4, 256).to(BF16)
    x[0, 3], x[1, 5], x[2] = torch.nan, torch.inf, 0
    x[3] *= 1e30
    out = made.matmul(x, None)
    assert out[:2].isnan().all()
    assert not out[2].any()
    assert out[3].isfinite().all()
    assert not made_of(Fp8Weight, torch.zeros(16, 16, dtype=BF16), None).dense().any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_there_and_back(recipe):
    """Claimed by name, within the tolerance of the check, same keys, and every byte comes back."""
    model = case("llama", CAUSAL, dtype=BF16).build(vocab_size=304)
    stock, before = copy.deepcopy(model), snapshot(model)
    found = claims(model, GPU, recipe)
    assert found["model.layers.0.self_attn.q_proj"] == recipe
    assert found.get("lm_head") == {"int4": "int8", "int8": "int8"}.get(recipe)
    optimus.transform(model, recipe, backend=GPU)
    assert values(model.state_dict()) == values(stock.state_dict())
    given = batch(model)
    far = distance(model(**given).logits, stock(**given).logits, given["attention_mask"])
    assert 0 < far < LOSSY[recipe]
    assert generated(model).shape == generated(stock).shape
    optimus.reverse(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("recipe", RECIPES)
def test_writes_copies_and_checkpoints(recipe):
    """What is written survives; a copy lives alone; a stock checkpoint loads."""
    model = rounded(linear(), recipe)
    twin, x = copy.deepcopy(model), torch.randn(3, 256).to(BF16)
    with torch.no_grad():
        assert torch.equal(model(x), twin(x))
        model[0].weight[7] = 3.0
        assert distance(model(x)[:, 7].float(), 3 * x.float().sum(1) + model[0].bias[7], None) < 0.1
        assert not torch.equal(model(x), twin(x))
    wanted = linear()[0].weight.detach().clone()
    wanted[7] = 3.0
    assert torch.equal(optimus.reverse(model)[0].weight, wanted)
    other = linear()
    bump(other)
    twin.load_state_dict(other.state_dict())
    assert distance(twin(x).float(), other(x).float(), None) < LOSSY[recipe]
    assert values(optimus.reverse(twin).state_dict()) == values(other.state_dict())


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_graph(recipe):
    """Compiled whole, with weights that stay where they are."""
    model = rounded(nn.Sequential(*linear(), nn.ReLU()), recipe)
    frames, answer = compiled(model)
    assert frames == 1
    assert distance(answer, model(**batch(model)), None) < 1e-2
    state = vars(model[0])["_weight_state"].packed
    held = [one for one in vars(state).values() if isinstance(one, Tensor)]
    assert {one._dynamo_static_input_type for one in held} == {"unguarded"}


def test_other_dtypes():
    """8 bits follow a model that is cast; the others have bf16 products alone, and are dense."""
    for recipe in RECIPES:
        model, x = rounded(linear(), recipe), torch.randn(3, 256)
        with torch.no_grad():
            before = model(x.to(BF16)).float()
            model.float()
            assert distance(model(x), before, None) < 2 * LOSSY[recipe]
        optimus.reverse(model)
        assert torch.equal(model[0].weight, linear().float()[0].weight)


def test_autocast_and_odd_inputs_are_stock():
    """Under autocast the dense weight computes; a call of another dtype fails as stock's does."""
    model = rounded(linear(dtype=torch.float32), "int8")
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        assert model(torch.randn(2, 256)).dtype is BF16
    with pytest.raises(RuntimeError, match="dtype"):
        rounded(linear(), "int4")(torch.randn(2, 256))
    assert rounded(linear(), "fp8")(torch.randn(0, 256).to(BF16)).shape == (0, 512)


@pytest.mark.parametrize(
    ("recipe", "model", "words"),
    [
        ("int4", lambda: linear(dtype=torch.float16), "weight is float16, and .* of bfloat16"),
        ("fp8", lambda: linear(dtype=torch.float32), "weight is float32"),
        ("int4", lambda: linear(320), "320 input features are no multiple of 128"),
        ("fp8", lambda: linear(260), "260 to 512 features: fp8 products take multiples of 16"),
        ("int8", lambda: linear(64), "too small to pay"),
    ],
)
def test_refusals(recipe, model, words):
    """What no layout takes is left alone, and nothing else was asked for."""
    with pytest.raises(NothingToDoError, match=words):
        optimus.plan(model(), recipe, backend=GPU)


def test_lesser_hardware():
    """By name on a GPU that cannot: an error, also where a head would have been rounded."""
    model = case("llama", CAUSAL, dtype=BF16).build(vocab_size=304)
    for recipe, feature, words in (
        ("int4", "int4-tiles", "no products of 4-bit tiles"),
        ("fp8", "fp8-rows", "no products of fp8 rows"),
    ):
        with pytest.raises(BackendUnavailableError, match=words):
            optimus.plan(model, recipe, backend=without(feature))
    with pytest.raises(BackendUnavailableError, match="fp8 found nothing to do: not built for x86"):
        optimus.plan(model, "fp8", backend=optimus.Backend("x86", "cpu"))


def test_features():
    """What a compute capability brings."""
    assert cuda_features((7, 5)) == {"int8-weights"}
    assert cuda_features((8, 0)) == GPU.features - {"fp8-rows"}
    assert cuda_features((9, 0)) == GPU.features
    assert cuda_features((9, 4), hip="6.3") == {"int8-weights", "packed-attention"}


def test_names_end_as_the_cpus_do():
    """One recipe serves both."""
    known = {r.name.rpartition(".")[2] for r in Registry.installed().replacements}
    mine = {r.name.rpartition(".")[2] for r in rows.ARCHITECTURE.replacements}
    assert mine <= known
    assert mine <= LOSSY.keys()


def test_originals_wait_on_the_host(monkeypatch):
    """Those of another device are moved, come back as its parameters, and are saved from there."""
    monkeypatch.setattr(originals, "HOSTS", ())
    monkeypatch.setattr(rounding, "SLICE", rounding.WIDE_SLICE)
    for keep in ("host", "disk"):
        model = linear()
        before = snapshot(model)
        rounded(model, "int8", keep=keep)
        state = vars(model[0])["_weight_state"]
        assert state.original.twin is not None
        assert model.state_dict()["0.weight"].device.type == "cpu"
        assert snapshot(optimus.reverse(model)) == before
