"""What CUDA's passes do to a model: compiled by another compiler, captured by a double, packed by a
double of the kernel.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter

import pytest
import torch
from gpu import GPU, Gpu
from models import batch, case, masks
from snapshots import distance, snapshot, values
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from uses import bump

import optimus
from optimus.core.errors import BackendUnavailableError, NothingToDoError, PlanError
from optimus.core.registry import Registry
from optimus.generation.buckets import Buckets
from optimus.generation.cuda_graphs import Captured, Graphs
from optimus.generation.runner import Eager
from optimus.generation.warm import compilations, warm_up
from optimus.ops import varlen
from optimus.ops.varlen import Ragged, Sequences, packed_kernel, varlen_attention
from optimus.passes._static import Static
from optimus.passes.cuda import REDUCED, TUNED, Capture, Compile, blocks_of

pytestmark = pytest.mark.usefixtures("one_thread")
BERT, LLAMA = case("bert"), case("llama", "AutoModelForCausalLM")
NAMES = ("cuda.compile", "cuda.compile-blocks", "cuda.compile-whole")
BF16 = torch.bfloat16
GPU_ALONE = frozenset({"cuda"})


def compiling(name: str, **options: object) -> tuple[optimus.Recipe, Registry]:
    """The pass of that name on a compiler that is everywhere, alone."""
    known = next(one for one in Registry.installed().passes if one.name == name)
    made = Compile(name, known.blocks, known.graphs, compiler="aot_eager")
    return optimus.Recipe("compiled", ((name,),)), Registry([], [made])


def capturing(gpu: Gpu, most: int = 4) -> tuple[optimus.Recipe, Registry]:
    """Captures on the double, alone."""
    made = Capture(make=lambda: Graphs(gpu, most))
    return optimus.Recipe("captured", ((made.name,),)), Registry([], [made])


def transformed(model: nn.Module, how: tuple[optimus.Recipe, Registry], **options: object):
    """Transformed for the double and not checked."""
    recipe, registry = how
    options = {"check": False, **options}
    return optimus.transform(model, recipe, backend=GPU, registry=registry, **options)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_there_and_back(name):
    """Blocks or the whole are compiled: same answers, keys and classes; nothing stays behind."""
    model = BERT.build()
    stock, before = copy.deepcopy(model), snapshot(model)
    transformed(model, compiling(name), check=True)
    paths = blocks_of(model) if name != "cuda.compile-whole" else ("",)
    found = {path for path, one in model.named_modules() if one._compiled_call_impl is not None}
    assert found == set(paths)
    assert values(model.state_dict()) == values(stock.state_dict())
    with torch.no_grad():
        answers = [one(**batch(one)).last_hidden_state for one in (model, stock)]
        twin = copy.deepcopy(model)(**batch(model)).last_hidden_state
    assert distance(*answers, masks()["right"]) < 1e-5
    assert torch.equal(twin, answers[1])
    optimus.reverse(model)
    for one in (*model.parameters(), *model.buffers()):  # torch's own mark on what it has compiled
        vars(one).pop("_dynamo_static_input_type", None)
    assert snapshot(model) == before
    assert all(one._compiled_call_impl is None for one in model.modules())


def test_options_are_inductors_own():
    """Every option is one that this torch knows, and reduces overhead as its mode does."""
    import torch._inductor as inductor

    assert set(REDUCED) <= set(inductor.list_options())
    mode = inductor.list_mode_options("reduce-overhead")
    assert mode.items() <= REDUCED.items()
    assert TUNED.items() <= REDUCED.items()


def test_inductor_gets_the_options(monkeypatch):
    """Of the pass that is installed; triton need not be there to say what would be done."""
    seen = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: seen.append(given))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    recipe = optimus.Recipe("compiled", (("cuda.compile-whole",),))
    optimus.transform(BERT.build(), recipe, backend=GPU, check=False)
    assert seen == [{"backend": "inductor", "options": REDUCED}]


# Dynamo looks at the hidden states of the first block, as it does at any tensor.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_training():
    """A step through compiled blocks is the stock one, and there is no break in them."""
    model, stock = LLAMA.build().train(), LLAMA.build().train()
    transformed(model, compiling("cuda.compile"), mode="training")
    torch._dynamo.utils.counters.clear()
    for one in (model, stock):
        one(**batch(one)).logits.square().mean().backward()
    pairs = zip(model.parameters(), stock.parameters(), strict=True)
    assert all(distance(mine.grad, theirs.grad, None) < 1e-5 for mine, theirs in pairs)
    assert not torch._dynamo.utils.counters["graph_break"]


def test_blocks():
    """Rows of one kind, the outermost; none in a perceptron."""
    assert blocks_of(LLAMA.build()) == ("model.layers.0", "model.layers.1")
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == ()
    nested = nn.ModuleList([nn.ModuleList([nn.ReLU(), nn.ReLU()]) for _ in range(2)])
    assert blocks_of(nested) == ("0.0", "0.1", "1.0", "1.1")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("cuda.compile", lambda m: m.encoder.layer[1].compile(backend="eager"), "compiled already"),
        ("cuda.compile", lambda m: delattr(m, "encoder"), "has no blocks"),
        ("cuda.graphs", lambda m: vars(m.pooler).update(_hf_hook=object()), "accelerate moves"),
    ],
)
def test_refusals(name, change, words):
    """Asked for by name, and why not."""
    model = BERT.build()
    change(model)
    how = capturing(Gpu()) if name == "cuda.graphs" else compiling(name)
    with pytest.raises(NothingToDoError, match=words):
        transformed(model, how)


def test_without_triton(monkeypatch):
    """torch's compiler for CUDA is triton."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NothingToDoError, match="triton, which is not installed"):
        optimus.plan(BERT.build(), optimus.Recipe("one", (("cuda.compile",),)), backend=GPU)


@pytest.mark.parametrize("name", ["cuda.compile-whole", "cuda.compile-blocks", "cuda.graphs"])
def test_other_uses(name):
    """Graphs have no backward pass, other hardware has none of it, and "auto" takes none."""
    recipe = optimus.Recipe("one", ((name,),))
    with pytest.raises(NothingToDoError, match="no backward pass"):
        transformed(BERT.build(), (recipe, compiling_and_capturing()), mode="training")
    with pytest.raises(BackendUnavailableError, match="is not built for x86"):
        optimus.plan(BERT.build(), recipe, backend=optimus.Backend("x86", "cpu"))
    assert not optimus.plan(BERT.build(), "auto", backend=GPU).passes


def compiling_and_capturing() -> Registry:
    """All four passes, without triton."""
    made = [compiling(name)[1].passes[0] for name in NAMES]
    return Registry([], [*made, Capture(make=lambda: Graphs(Gpu()))])


def test_captured_there_and_back():
    """Every batch gets its own answer, replayed where the shape came before; all comes back."""
    gpu, model = Gpu(), BERT.build()
    stock, before = copy.deepcopy(model), snapshot(model)
    transformed(model, capturing(gpu), check=True)
    with torch.no_grad():
        for kind in ("right", "hole", "right", "ones", "single"):
            for _ in range(2):
                mine, theirs = (one(**batch(one, kind)) for one in (model, stock))
                assert type(mine) is type(theirs)
                assert torch.equal(mine.last_hidden_state, theirs.last_hidden_state)
                assert torch.equal(mine.pooler_output, theirs.pooler_output)
    counts = vars(model)["_optimus_graphs"].graphs.counts
    assert counts.replayed >= 6
    assert counts.captured <= 3
    assert values(model.state_dict()) == values(stock.state_dict())
    optimus.reverse(model)
    assert snapshot(model) == before


def test_captured_weights_may_change():
    """Written to, replaced or loaded: the next answer is of the new ones."""
    gpu, model, stock = Gpu(), BERT.build(), BERT.build()
    transformed(model, capturing(gpu))
    other = BERT.build(seed=1).state_dict()
    changes = (
        lambda _: None,
        bump,
        lambda one: one.load_state_dict(copy.deepcopy(other), assign=True),
    )
    with torch.no_grad():
        for change in changes:
            change(model), change(stock)
            for _ in range(3):
                answers = [one(**batch(one)).last_hidden_state for one in (model, stock)]
                assert torch.equal(*answers)
    assert len(gpu.alive) == 1


def test_what_is_not_captured():
    """Gradients, training, a cache, objects, and models that are watched from within."""
    gpu, model, stock = Gpu(), LLAMA.build(), LLAMA.build()
    transformed(model, capturing(gpu))
    given = batch(model)
    for _ in range(3):
        assert model(**given).logits.requires_grad
    with torch.no_grad():
        for _ in range(3):
            cached = model(**given, use_cache=True)
            assert cached.past_key_values.get_seq_length() == given["input_ids"].shape[1]
        asked = {**given, "max_new_tokens": 3, "do_sample": False}
        assert torch.equal(*(one.generate(**asked) for one in (model, stock)))
        seen: Counter[str] = Counter()
        hook = model.model.norm.register_forward_hook(lambda *_: seen.update("x"))
        for _ in range(3):
            model(**given, use_cache=False)
    assert seen["x"] == 3
    assert not gpu.alive
    hook.remove()
    with torch.no_grad():
        for _ in range(3):
            answers = [one(**given, use_cache=False).logits for one in (model, stock)]
            assert torch.equal(*answers)
    assert len(gpu.alive) == 1


def test_generation_is_captured():
    """Every bucket in the warm-up; then tokens are those of stock, and nothing is captured."""
    gpu, model, stock = Gpu(), LLAMA.build(), LLAMA.build()
    made = Static("static.double", GPU_ALONE, lambda: Captured(Eager(), Graphs(gpu, 96)))
    how = optimus.Recipe("static", ((made.name,),)), Registry([], [made])
    transformed(model, how)
    buckets = Buckets(lengths=(8, 16), batches=(1, 4), room=32)
    assert warm_up(model, buckets) == len(gpu.alive) == 12
    generator = torch.Generator().manual_seed(0)
    for rows, length in ((1, 5), (3, 9), (2, 20), (1, 16)):
        ids = torch.randint(3, 99, (rows, length), generator=generator)
        asked = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(*(one.generate(ids, **asked) for one in (model, stock)))
    assert compilations(model) == 0
    assert gpu.pools == 1
    bump(model), bump(stock)
    assert torch.equal(*(one.generate(ids, **asked) for one in (model, stock)))
    optimus.reverse(model)


def test_copies_of_captured_models():
    """A copy has graphs of its own, and a second transform is refused."""
    gpu, model = Gpu(), BERT.build()
    transformed(model, capturing(gpu))
    with torch.no_grad():
        answers = [model(**batch(model)).last_hidden_state for _ in range(2)]
        twin = copy.deepcopy(model)
        assert len(vars(twin)["_optimus_graphs"].graphs) == 0
        answers += [twin(**batch(twin)).last_hidden_state for _ in range(2)]
    assert all(torch.equal(one, answers[0]) for one in answers)
    with pytest.raises(PlanError, match="already transformed"):
        transformed(model, compiling("cuda.compile"))


def kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """A double of ``torch.nn.attention.varlen.varlen_attn``: ``[total, heads, dim]``, from its
    documentation: windows are (left, right), -1 is no end, (-1, 0) is causal.
    """
    assert query.shape == key.shape
    assert cu_seq_q.dtype is torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    owner = torch.repeat_interleave(torch.arange(len(cu_seq_q) - 1), cu_seq_q.diff())
    at = torch.arange(len(owner))
    seen = owner[:, None] == owner
    left, right = window_size
    apart = at[:, None] - at
    seen &= (apart <= left) | (left < 0)
    seen &= (-apart <= right) | (right < 0)
    whole = (one.transpose(0, 1).float() for one in (query, key, value))
    out = scaled_dot_product_attention(*whole, attn_mask=seen, scale=scale)
    return out.transpose(0, 1).to(query.dtype)


def grouping(*args: Tensor, enable_gqa: bool = False, **options: object) -> Tensor:
    """The kernel of a later torch."""
    assert enable_gqa
    query, key, value, *rest = args
    times = query.shape[1] // key.shape[1]
    wide = (one.repeat_interleave(times, 1) for one in (key, value))
    return kernel(query, *wide, *rest, **options)


@pytest.fixture(params=[kernel])
def packing(request, monkeypatch):
    """The kernel's double, on the CPU; how often it was called."""
    calls: Counter[str] = Counter()

    def counted(*args, **options):
        calls["kernel"] += 1
        return request.param(*args, **options)

    counted.__signature__ = inspect.signature(request.param)
    monkeypatch.setattr(varlen, "packed_kernel", lambda: counted)
    monkeypatch.setattr(varlen, "DEVICES", ("cpu",))
    return calls


def test_torchs_kernel_is_found():
    """This torch has it, with the arguments that are used; it needs a GPU to be called."""
    known = inspect.signature(packed_kernel()).parameters
    mine = inspect.signature(kernel).parameters
    assert list(known)[:7] == list(mine)[:7]
    assert {"scale", "window_size"} <= known.keys()


@pytest.mark.parametrize("packing", [kernel, grouping], indirect=True)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1])
def test_packed_attention(packing, causal, window, monkeypatch):
    """One call gives what one call a sequence gives: windows, causal or not, shared keys."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0], [1] * 7])
    ragged = Ragged(mask)
    ((_, sequences),) = ragged.pieces(100, causal=causal)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 13, 8, generator=generator).to(BF16) for h in (4, 2, 2))
    out = varlen_attention(q, k, v, sequences, scale=0.3, window=window)
    assert packing["kernel"] == 1
    monkeypatch.setattr(varlen, "DEVICES", ())
    apart = varlen_attention(q, k, v, sequences, scale=0.3, window=window)
    assert distance(out.float(), apart.float(), None) < 1e-2


def test_windows_count_places(packing):
    """Where padding lies within a sequence, tokens are further apart than they lie."""
    sequences = Sequences((3,), torch.tensor([0, 2, 3]))
    q = torch.randn(1, 2, 3, 8).to(BF16)
    varlen_attention(q, q, q, sequences, scale=None, window=1)
    assert packing["kernel"] == 0
    varlen_attention(q, q, q, sequences, scale=None, window=None)
    assert packing["kernel"] == 1


@pytest.mark.parametrize("one", [BERT, case("modernbert"), LLAMA], ids=str)
def test_unpadded(one, packing):
    """Encoders and prompts are packed: one kernel call a layer, and the answers of the stock."""
    model, stock = one.build().to(BF16), one.build().to(BF16)
    optimus.transform(model, "auto", backend=GPU)
    packing.clear()
    mask = masks()["right"]
    with torch.no_grad():
        mine, theirs = (m(**batch(m)) for m in (model, stock))
    assert packing["kernel"] == 2
    assert distance(mine[0], theirs[0], mask) < 3e-2
    assert not mine[0][mask == 0].any()


def test_unpadding_is_refused():
    """Without the kernel, for fp32, and for heads that it does not take."""
    lesser = optimus.Backend("cuda", "cpu")
    narrow = BERT.build(num_attention_heads=64).to(BF16)
    for model, backend, words in (
        (BERT.build().to(BF16), lesser, "no attention over packed sequences"),
        (BERT.build(), GPU, "for bf16 and fp16, not float32"),
        (narrow, GPU, "heads of 4 have no packed attention"),
    ):
        made = optimus.plan(model, "auto", backend=backend)
        assert any(words in why.reason for _, name, why in made.refusals if "unpadded" in name)
