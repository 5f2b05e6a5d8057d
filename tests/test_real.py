"""Graphs without complex numbers: of a decoder in the manner of the reference Llama, and of odd
ones."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from reference_llama import reference_llama, turned
from snapshots import distance, values
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from optimus.ops.real import ComplexError, complex_steps, real, real_backend
from optimus.ops.rotary import Pairs, Reals

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # torch's own, where it copies its tree specs.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning"),
]

CLOSE = 1e-6
KINDS = pytest.mark.parametrize("table", ["attribute", "buffer", "inside"])
DIMS = {"ids": {0: torch.export.Dim("rows", max=4), 1: torch.export.Dim("length", max=40)}}


def ids(rows=2, length=7):
    """Words."""
    return torch.randint(99, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Seen:
    """A backend that runs graphs as they are, and counts them and their complex steps."""

    def __init__(self):
        self.graphs, self.steps = 0, []

    def __call__(self, module, inputs):
        """Look."""
        self.graphs += 1
        self.steps += complex_steps(module)
        self.steps += [one for one in inputs if isinstance(one, torch.Tensor) and one.is_complex()]
        return module.forward


class Formula(nn.Module):
    """One function of tensors, as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        """Of them."""
        return self.function(*args)


@KINDS
@pytest.mark.parametrize("dims", [None, DIMS], ids=["fixed", "dynamic"])
def test_exported(table, dims):
    """No complex step or constant, stock answers and keys, also of other sizes and decomposed."""
    model = reference_llama(table=table)
    before = values(model.state_dict())
    program = torch.export.export(model, (ids(),), dynamic_shapes=dims)
    made = real(program)
    assert complex_steps(program.graph_module)
    assert complex_steps(made.graph_module) == []
    assert not any(t.is_complex() for t in made.constants.values())
    assert values(made.state_dict) == values(program.state_dict)
    assert sorted(made.state_dict) == sorted(model.state_dict())
    assert complex_steps(real(program.run_decompositions()).graph_module) == []
    assert complex_steps(made.run_decompositions().graph_module) == []
    for given in [ids(), *([ids(3, 11)] if dims else [])]:
        assert distance(made.module()(given), model(given), None) <= CLOSE
    assert values(model.state_dict()) == before
    assert real(made) is made


def test_exported_and_saved():
    """What is saved and loaded answers the same, and has the stock keys."""
    model = reference_llama(table="buffer")
    held = io.BytesIO()
    torch.export.save(real(torch.export.export(model, (ids(),))), held)
    held.seek(0)
    loaded = torch.export.load(held)
    assert distance(loaded.module()(ids()), model(ids()), None) <= CLOSE
    assert sorted(loaded.state_dict) == sorted(model.state_dict())


@KINDS
def test_compiled(table):
    """In whole, without a complex step or input; a prompt, and then words from the cache."""
    stock, seen = reference_llama(table=table), Seen()
    mine = copy.deepcopy(stock)
    compiled = torch.compile(mine, backend=real_backend(seen), fullgraph=True)
    with torch.no_grad():
        for start, length in ((0, 7), (7, 1), (8, 1), (9, 4)):
            given = ids(2, length)
            assert distance(compiled(given, start), stock(given, start), None) <= CLOSE
    assert seen.graphs > 0
    assert seen.steps == []
    assert values(mine.state_dict()) == values(stock.state_dict())
    assert table != "attribute" or mine.freqs_cis.is_complex()


def test_no_more_graphs_than_without():
    """It adds no recompilation."""
    counts = []
    for wrap in (lambda one: one, real_backend):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(reference_llama(), backend=wrap(counter), fullgraph=True)
        with torch.no_grad():
            for start, length in ((0, 7), (0, 9), (9, 1), (10, 1), (11, 1)):
                compiled(ids(2, length), start)
        counts.append(counter.frame_count)
    assert counts[0] == counts[1]


def test_inductor_is_content():
    """No warning of complex operators, which stock gives; through inductor, and backwards."""
    from torch._inductor import lowering

    table = reference_llama().freqs_cis[:7]
    states = torch.randn(2, 7, 4, 16, requires_grad=True)
    twin = states.detach().clone().requires_grad_()
    for backend, content in (("inductor", False), (real_backend(), True)):
        torch._dynamo.reset()
        lowering._warn_complex_not_supported.cache_clear()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            out = torch.compile(turned, backend=backend, fullgraph=True)(twin, table)
        assert any("complex" in str(one.message) for one in found) is not content
    out.pow(2).sum().backward()
    expected = turned(states, table)
    expected.pow(2).sum().backward()
    assert distance(out, expected, None) <= CLOSE
    assert distance(twin.grad, states.grad, None) <= CLOSE


def _spectrum(x):
    return torch.fft.fft(x).abs()


def _scaled_in_place(x):
    whole = torch.view_as_complex(x)
    whole *= 2
    return torch.view_as_real(whole)


def _written_through(x):
    whole = torch.view_as_complex(x) * 2j
    torch.view_as_real(whole).add_(1)
    return torch.view_as_real(whole * whole)


def _written_before(x):
    x = x.clone()
    whole = torch.view_as_complex(x)
    x.add_(1)
    return torch.view_as_real(whole * whole)


def _cast(x):
    return torch.view_as_real(x[..., 0].to(torch.complex64) * torch.view_as_complex(x))


def _seen_otherwise(x):
    return (torch.view_as_complex(x) * 2).view(torch.float32)


UNKNOWN = [_spectrum, _scaled_in_place, _written_through, _written_before, _cast, _seen_otherwise]


@pytest.mark.parametrize("function", UNKNOWN, ids=lambda one: one.__name__)
def test_unknown_steps(function):
    """Exported: an error that names the step. Compiled: a warning, and right numbers."""
    given = torch.randn(3, 4, 2)
    with pytest.raises(ComplexError, match=r"\(aten\.\w+"):
        real(torch.export.export(Formula(function), (given.clone(),)))
    compiled = torch.compile(function, backend=real_backend("eager"), fullgraph=True)
    with pytest.warns(UserWarning, match="compiled as it is"):
        found = compiled(given.clone())
    assert distance(found, function(given.clone()), None) == 0


def _arithmetic(x, y):
    z, w = torch.view_as_complex(x), torch.complex(y[..., 0], y[..., 1])
    both = torch.stack([z.conj() * w, -z, z / 2, 3 * w - z, z * (1 + 2j)]).sum(0)
    joined = torch.cat([both[None], (z + w).unsqueeze(0)]).transpose(0, 1).reshape(-1, 2)
    return torch.view_as_real(joined), joined.real * joined.imag, joined[1:].imag


def test_arithmetic():
    """Whatever a rule knows: exported, compiled, and under a module's own forward."""
    given = torch.randn(3, 4, 2), torch.randn(3, 4, 2)
    expected = _arithmetic(*given)
    program = real(torch.export.export(Formula(_arithmetic), given))
    seen = Seen()
    compiled = torch.compile(_arithmetic, backend=real_backend(seen), fullgraph=True)
    assert distance(program.module()(*given), expected, None) <= CLOSE
    assert distance(compiled(*given), expected, None) <= CLOSE
    assert (complex_steps(program.graph_module), seen.steps) == ([], [])
    with Reals():
        assert distance(_arithmetic(*given), expected, None) <= CLOSE


def test_pairs_of_what_no_rule_knows():
    """Such a step is computed on the complex tensor."""
    x = torch.randn(3, 4, 2)
    with Reals():
        pairs = torch.view_as_complex(x)
        found = [pairs.abs(), torch.fft.fft(pairs), pairs.angle(), 1 - pairs, pairs * pairs.dense()]
    whole = torch.view_as_complex(x)
    expected = [whole.abs(), torch.fft.fft(whole), whole.angle(), 1 - whole, whole * whole]
    assert isinstance(pairs, Pairs)
    assert (pairs.shape, pairs.ndim, pairs.dtype) == (whole.shape, whole.ndim, whole.dtype)
    same = [one.dense() if isinstance(one, Pairs) else one for one in found]
    assert all(torch.allclose(a, b) for a, b in zip(same, expected, strict=True))


def test_complex_inputs_and_outputs():
    """Outside the graph when compiling, with gradients; a program's own signature cannot change."""
    z = torch.randn(3, 4, dtype=torch.complex64)
    seen = Seen()
    compiled = torch.compile(lambda z, w: (z * w, z.real), backend=real_backend(seen))
    given = z.clone().requires_grad_()
    found = compiled(given, z.conj())
    assert torch.allclose(found[0], z * z.conj())
    assert seen.steps == []
    found[0].real.sum().backward()
    assert torch.allclose(given.grad, z, atol=1e-6)
    for function, match in ((torch.view_as_real, "complex input"), (torch.abs, "complex input")):
        with pytest.raises(ComplexError, match=match):
            real(torch.export.export(Formula(function), (z,)))
    with pytest.raises(ComplexError, match="complex output"):
        real(torch.export.export(Formula(torch.view_as_complex), (torch.randn(3, 2),)))


def test_graphs_without_complex_numbers_are_left_alone():
    """The same program, and the same module to the compiler."""
    program = torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),))
    assert real(program) is program
