"""A model whose calls of one shape are captured as a CUDA graph and replayed."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from optimus.core.replacement import Mixin
from optimus.generation.cuda_graphs import Graphs, weights_of
from optimus.replacements._watch import is_watched

GRAPHS = "_optimus_graphs"
PLAIN = (type(None), bool, int, float, str)


class Replays:
    """The graphs of one model, and the form of what each of its calls returns."""

    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs
        self._forms: dict[Any, tuple[Any, list[Any]] | None] = {}
        self._weights: int | None = None

    def call(self, model: nn.Module, stock: Any, args: Any, kwargs: Any) -> Any:
        """What ``stock`` would answer; by itself where a call is of more than plain tensors."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if not all(type(one) in PLAIN or type(one) is Tensor for one in leaves):
            return stock(*args, **kwargs)
        self._check(model)
        where = [number for number, one in enumerate(leaves) if isinstance(one, Tensor)]
        tensors = [leaves[number] for number in where]
        rest = tuple(None if isinstance(one, Tensor) else one for one in leaves)
        shapes = tuple((one.shape, one.dtype) for one in tensors)
        what = (str(spec), rest, shapes, *_state(tensors))
        if self._forms.get(what, ()) is None:
            return stock(*args, **kwargs)
        answers: list[Any] = []

        def work(*given: Tensor) -> list[Tensor]:
            filled = list(leaves)
            for number, one in zip(where, given, strict=True):
                filled[number] = one
            inner_args, inner_kwargs = pytree.tree_unflatten(filled, spec)
            answers.append(stock(*inner_args, **inner_kwargs))
            return self._taken_apart(what, answers[-1])

        made = self.graphs.run(type(model).__name__, what, work, *tensors)
        form = self._forms[what]
        return answers[-1] if form is None else _together(form, made)

    def _taken_apart(self, what: Any, answer: Any) -> list[Tensor]:
        leaves, spec = pytree.tree_flatten(answer)
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        plain = all(type(one) in PLAIN or isinstance(one, Tensor) for one in leaves)
        holes = [one if type(one) in PLAIN else Tensor for one in leaves]
        # A cache, say, that a replay would not make anew.
        self._forms[what] = (spec, holes) if plain else None
        return tensors

    def _check(self, model: nn.Module) -> None:
        found = weights_of(model)
        if found != self._weights:
            self.graphs.clear()
            self._forms.clear()
        self._weights = found

    def __deepcopy__(self, memo: dict[int, Any]) -> Replays:
        return Replays(Graphs(self.graphs.capture, self.graphs.most))

    def __reduce__(self) -> tuple[Any, ...]:
        return Replays, (self.graphs,)


def _together(form: tuple[Any, list[Any]], tensors: tuple[Tensor, ...]) -> Any:
    spec, holes = form
    given = iter(tensors)
    return pytree.tree_unflatten([next(given) if one is Tensor else one for one in holes], spec)


def _state(tensors: list[Tensor]) -> tuple[Any, ...]:
    """Of the process: what else a model's answer depends on."""
    kind = tensors[0].device.type if tensors else "cpu"
    autocast = torch.is_autocast_enabled(kind)
    return autocast, torch.get_autocast_dtype(kind) if autocast else None


class Replayed(Mixin):
    """The stock forward, launched at once where this shape was called before.

    The stock path serves training, gradients, tracing, a call with a cache or any other object in
    it, and a model that somebody watches from within: a replay calls no hook.
    """

    training: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stock = super().forward  # type: ignore[misc]
        replays: Replays = vars(self)[GRAPHS]
        if (
            self.training
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or torch.jit.is_tracing()
            or replays.graphs.capture.is_busy()
            or any(is_watched(one) for one in cast(nn.Module, self).modules() if one is not self)
        ):
            return stock(*args, **kwargs)
        return replays.call(cast(nn.Module, self), stock, args, kwargs)
