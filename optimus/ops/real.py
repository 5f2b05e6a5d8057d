"""Captured graphs without complex numbers: each complex tensor in them becomes a pair of real ones.

For modules that no replacement names. A graph is what ``torch.export`` and ``torch.compile`` have
made of a model, so whatever the model's source looks like, what it computes is in it, and nothing
of the model is touched: its complex buffers stay where they are, under their keys. This works on
graphs and tensors and knows no model, and so it stands with the other tensor functions.

A step that no rule knows is an error that names it, or, when compiling, a warning, and the graph
stays as it was.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
)
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._pytree import tree_leaves

from optimus.core.errors import OptimusError
from optimus.ops.rotary import Pairs, leaves, name_of, respond, split, value_of
from optimus.ops.rotary import polar as polar_pairs

Backend = Callable[..., Callable[..., Any]]

aten = torch.ops.aten
# What the rules are written in, as the exporter writes it.
OVERLOADS: dict[Any, Any] = {
    operator.add: aten.add.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.neg: aten.neg.default,
    operator.sub: aten.sub.Tensor,
    operator.truediv: aten.div.Tensor,
    torch.cos: aten.cos.default,
    torch.select: aten.select.int,
    torch.sin: aten.sin.default,
    torch.stack: aten.stack.default,
}
MAKERS = {"complex": Pairs, "polar": polar_pairs, "view_as_complex": split}
# What an exporter writes down of tensors that then are no more.
REMARKS = frozenset({"_assert_tensor_metadata"})
# Methods, and functions of operator, that write into their first argument and do not end in "_".
WRITERS = frozenset({"setitem", "iadd", "imul", "isub", "itruediv", "requires_grad_"})


class ComplexError(OptimusError, NotImplementedError):
    """A step of a graph that has no form in real numbers here."""


def is_complex(node: fx.Node) -> bool:
    """Whether a step of a graph makes a complex tensor."""
    return any(isinstance(v, Tensor) and v.is_complex() for v in tree_leaves(_value(node)))


def complex_steps(module: fx.GraphModule) -> list[fx.Node]:
    """Every step of a graph, and of the graphs within it, that makes or takes complex tensors."""
    graphs = [one.graph for one in module.modules() if isinstance(one, fx.GraphModule)]
    return [
        node
        for graph in graphs
        for node in graph.nodes
        if is_complex(node) or any(is_complex(one) for one in node.all_input_nodes)
    ]


def real(program: ExportedProgram) -> ExportedProgram:
    """The program without a complex step. Inputs, outputs and the state dict stay as they are.

    A complex buffer or constant is read from a constant ``…_real`` beside it, ``[..., 2]``, so a
    table that is exchanged in the state dict is not. ``ComplexError`` where a step, an input or an
    output has no real form.
    """
    if not complex_steps(program.graph_module):
        return program
    module = _copied(program.graph_module)
    constants, specs, tables = dict(program.constants), [], set()
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(inputs, program.graph_signature.input_specs, strict=True):
        specs.append(_real_spec(spec) if is_complex(node) else spec)
        if is_complex(node):
            constants[str(specs[-1].target)] = _table(program, spec)
            constants.pop(str(spec.target), None)
            tables.add(node)
    renamed = _Rewriting(module, tables).run()
    signature = ExportGraphSignature(specs, copy.deepcopy(program.graph_signature.output_specs))
    for old, new in renamed.items():
        signature.replace_all_uses(old, new)
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=constants,
        verifiers=program.verifiers,
    )


def _real_spec(spec: InputSpec) -> InputSpec:
    return InputSpec(InputKind.CONSTANT_TENSOR, spec.arg, f"{spec.target}_real")


def _table(program: ExportedProgram, spec: InputSpec) -> Tensor:
    """The value of a complex buffer or constant, as real numbers."""
    kept: dict[str, Any] = program.constants | program.state_dict
    if spec.kind is InputKind.USER_INPUT or spec.target not in kept:
        raise ComplexError(
            f"the program takes a complex input, {getattr(spec.arg, 'name', spec.arg)}: export the "
            "module that makes it, or one that takes torch.view_as_real of it."
        )
    return torch.view_as_real(kept[spec.target].detach().resolve_conj()).clone()


def real_backend(inner: str | Backend = "inductor") -> Backend:
    """A backend for ``torch.compile`` that hands graphs without complex steps to ``inner``.

    Complex inputs, buffers among them, and complex outputs are read as real ones on the way in and
    out, outside the graph: ``torch.compile(model, backend=real_backend())``.
    """

    def backend(module: fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        compiler: Any = torch._dynamo.lookup_backend(inner) if isinstance(inner, str) else inner
        if not complex_steps(module):
            return compiler(module, inputs, **options)  # type: ignore[no-any-return]
        try:
            rewritten, entries, exits = _realized(module)
        except ComplexError as error:
            warnings.warn(f"{error} The graph is compiled as it is.", stacklevel=2)
            return compiler(module, inputs, **options)  # type: ignore[no-any-return]
        compiled = compiler(rewritten, _as_real(inputs, entries), **options)
        return _between(compiled, entries, exits)

    return backend


def _realized(module: fx.GraphModule) -> tuple[fx.GraphModule, list[int], list[int]]:
    """A copy of a compiler's graph without complex steps, and which inputs and outputs were."""
    module = _copied(module)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    entries = [index for index, node in enumerate(inputs) if is_complex(node)]
    rewriting = _Rewriting(module, {inputs[index] for index in entries})
    rewriting.run()
    module.recompile()
    return module, entries, rewriting.exits


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """The same parameters under a graph of its own: an attempt may fail half way."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        known[node] = graph.node_copy(node, lambda one: known[one])
    twin = fx.GraphModule(module, graph)
    twin.meta.update(module.meta)
    return twin


def _as_real(inputs: Any, entries: list[int]) -> list[Any]:
    found = list(inputs)
    for index in entries:
        found[index] = torch.view_as_real(found[index].resolve_conj())
    return found


def _between(
    compiled: Callable[..., Any], entries: list[int], exits: list[int]
) -> Callable[..., Any]:
    def call(*inputs: Any) -> Any:
        outputs = compiled(*_as_real(inputs, entries))
        if not exits:
            return outputs
        found = list(outputs)
        for index in exits:
            found[index] = torch.view_as_complex(found[index].contiguous())
        return tuple(found)

    return call


class _Tracer(GraphAppendingTracer):
    """Writes what the rules do into the graph, with the values that tracing it would have given."""

    def __init__(self, graph: fx.Graph, key: str) -> None:
        super().__init__(graph)
        self.key = key

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any) -> fx.Node:
        if self.key == "val":
            target = OVERLOADS.get(target, target)
        node = super().create_node(kind, target, args, kwargs, *rest)
        given, named = fx.map_arg((node.args, node.kwargs), _value)
        mode = next((v.fake_mode for v in leaves(given) if hasattr(v, "fake_mode")), None)
        assert mode is not None
        with mode, torch.no_grad():
            if kind == "call_method":
                node.meta[self.key] = getattr(given[0], target)(*given[1:], **named)
            else:
                node.meta[self.key] = target(*given, **named)
        return node


class _Rewriting:
    """One graph, and which of its steps are pairs by now."""

    def __init__(self, module: fx.GraphModule, tables: set[fx.Node]) -> None:
        self.module, self.graph, self.tables = module, module.graph, tables
        nodes = self.graph.nodes
        self.key = "val" if any("val" in node.meta for node in nodes) else "example_value"
        self.tracer = _Tracer(self.graph, self.key)
        self.pairs: dict[fx.Node, Pairs] = {}
        self.gone: list[fx.Node] = []
        self.exits: list[int] = []
        self.renamed: dict[str, str] = {}

    def run(self) -> dict[str, str]:
        """Replace every complex step, or raise ``ComplexError`` with the graph half done.

        What real values that were replaced are called now, by their old names.
        """
        self._demand_no_writes()
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                self._enter(node)
            elif node.op == "output":
                self._leave(node)
            elif is_complex(node) or any(one in self.pairs for one in node.all_input_nodes):
                self._replace(node)
        for node in reversed(self.gone):
            self.graph.erase_node(node)
        for node in complex_steps(self.module):
            raise self._unknown(node)
        self.graph.lint()
        return self.renamed

    def _enter(self, node: fx.Node) -> None:
        if node not in self.tables:
            return
        node.meta = {self.key: _real_value(_value(node))}
        with self.graph.inserting_after(self._last_input()):
            self.pairs[node] = split(fx.Proxy(node, self.tracer))

    def _last_input(self) -> fx.Node:
        inputs: list[fx.Node] = [node for node in self.graph.nodes if node.op == "placeholder"]
        return inputs[-1]

    def _leave(self, node: fx.Node) -> None:
        if not any(one in self.pairs for one in node.all_input_nodes):
            return
        if self.key == "val":
            raise ComplexError("the program gives a complex output: let it give torch.view_as_real")
        outputs = list(node.args[0])  # type: ignore[arg-type]
        for index, one in enumerate(outputs):
            if isinstance(one, fx.Node) and one in self.pairs:
                with self.graph.inserting_before(node):
                    outputs[index] = self.pairs[one].stacked().node
                self.exits.append(index)
        node.args = (tuple(outputs),)

    def _replace(self, node: fx.Node) -> None:
        name = node.target if node.op == "call_method" else name_of(node.target)
        if name in REMARKS:
            self.gone.append(node)
            return
        with self.graph.inserting_before(node):
            found = self._respond(node, str(name))
        self._demand_like(node, found)
        if isinstance(found, Pairs):
            self.pairs[node] = found
        else:
            node.replace_all_uses_with(found.node)
            self.renamed[node.name] = found.node.name
        self.gone.append(node)

    def _respond(self, node: fx.Node, name: str) -> Any:
        if node.op not in ("call_function", "call_method"):
            raise self._unknown(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._given)
        if name in MAKERS and not any(isinstance(one, Pairs) for one in leaves((args, kwargs))):
            maker: Any = MAKERS[name]
            return maker(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.tracer.create_proxy(node.op, node.target, args, kwargs)

        return respond(call, name_of(name), tuple(args), dict(kwargs))

    def _given(self, node: fx.Node) -> Any:
        return self.pairs.get(node) or fx.Proxy(node, self.tracer)

    def _demand_like(self, node: fx.Node, found: Any) -> None:
        """The shape and dtype of what is replaced, or no replacement."""
        stock = _value(node)
        if isinstance(found, Pairs) and isinstance(stock, Tensor) and stock.is_complex():
            parts, stock = [found.real, found.imag], _real_value(stock)[..., 0]
        elif isinstance(found, fx.Proxy) and not is_complex(node):
            parts = [found]
        else:
            raise self._unknown(node)
        for value in (_value(part.node) for part in parts):
            if isinstance(stock, Tensor) and not _is_like(value, stock):
                raise self._unknown(node)

    def _demand_no_writes(self) -> None:
        """Parts live in memory of their own: who writes through a view of a complex tensor, or into
        one, would be missed."""
        watched = {
            _memory(value)
            for node in complex_steps(self.module)
            for step in (node, *node.all_input_nodes)
            for value in tree_leaves(_value(step))
            if isinstance(value, Tensor)
        }
        for node in self.graph.nodes:
            for value in _written(node):
                if _memory(value) in watched:
                    raise ComplexError(f"{node.name} ({node.target}) writes into a complex tensor.")

    def _unknown(self, node: fx.Node) -> ComplexError:
        return ComplexError(f"no real form is known for {node.name} ({node.target}).")


def _value(node: Any) -> Any:
    if not isinstance(node, fx.Node):
        return node
    return value_of(node)


def _real_value(value: Tensor) -> Tensor:
    """What ``torch.view_as_real`` gives of a value that nobody computes."""
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.view_as_real(value.detach().resolve_conj())


def _is_like(one: Tensor, other: Tensor) -> bool:
    """Of one dtype and shape; sizes that are symbols are not asked, which would bind them."""
    sizes = zip(one.shape, other.shape, strict=False)
    known = [(a, b) for a, b in sizes if isinstance(a, int) and isinstance(b, int)]
    same = all(a == b for a, b in known)
    return same and one.ndim == other.ndim and one.dtype is other.dtype


def _memory(value: Tensor) -> int:
    address: int = value.untyped_storage()._cdata
    return address


def _written(node: fx.Node) -> Iterator[Tensor]:
    """The tensors into which a step writes."""
    if node.op not in ("call_function", "call_method"):
        return
    if isinstance(node.target, torch._ops.OpOverload):
        names = [a.name for a in node.target._schema.arguments if a.is_write]
        known = [a.name for a in node.target._schema.arguments]
        given = dict(zip(known, node.args, strict=False)) | node.kwargs
        targets = [given[name] for name in names if name in given]
    else:
        name = name_of(node.target)
        writes = name in WRITERS or (name.endswith("_") and not name.endswith("__"))
        targets = [*node.args[: int(writes)], node.kwargs.get("out")]
    yield from (v for v in tree_leaves(fx.map_arg(targets, _value)) if isinstance(v, Tensor))
