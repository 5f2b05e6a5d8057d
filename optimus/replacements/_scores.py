"""Attention written out by hand, on the fused kernel: one mixin for every way of writing it.

The model's own forward runs, and its scores are never written (``ops.scores``). So nothing of the
model is copied, and what transformers changes in it is followed; what does not fit one kernel
call is computed as the model computes it.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from optimus.core.replacement import SHORTEST, Architecture, Mixin, Replacement
from optimus.core.surgery import Surgeon
from optimus.ops.deferred import Deferred
from optimus.ops.scores import Derived, Scores
from optimus.replacements._families import targets
from optimus.replacements._watch import is_watched, records_weights

ASKED = "output_attentions"
PLACE = "_optimus_asked"


class FusedScores(Mixin):
    """Softmax attention of any shape. Weights are written where somebody asks for them."""

    attends = True

    @classmethod
    def setup(cls, module: nn.Module, surgeon: Surgeon) -> None:
        """Where among its arguments the forward is asked for weights; past the end if nowhere."""
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        place = names.index(ASKED) if ASKED in names else len(names)
        surgeon.set_attribute(module, PLACE, place)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the original; by its own way where somebody reads weights or watches its parts."""
        shortest = vars(self).get(SHORTEST, 1)
        short = self.extent(args, kwargs) < shortest
        if short or is_wanted(self, args, kwargs) or is_opened(self):
            return super().forward(*args, **kwargs)
        with Deferred(shortest):
            out = super().forward(*args, **kwargs)
        return _written(out)

    @staticmethod
    def extent(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """About how long the longest row of queries is, from the first tensor that comes in.

        Short calls, and so each step of decoding, are not even begun in another way than stock's:
        at such sizes the bookkeeping of unwritten scores costs more than the scores.
        """
        for one in (*args, *kwargs.values()):
            if isinstance(one, Tensor) and one.ndim > 2:
                return one.numel() // (one.shape[-1] * min(one.shape[0], one.shape[1]) or 1)
        return sys.maxsize


class FusedByColumns(FusedScores):
    """Of ``[batch, width, length]``, as convolutions have it."""

    @staticmethod
    def extent(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The last dimension of the first tensor."""
        tensors = (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        return next((one.shape[-1] for one in tensors), sys.maxsize)


class FusedWithoutGradients(FusedScores):
    """Where the softmax is an ``autograd.Function``, which does not see what is unwritten."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the original; by its own way where there may be a backward pass."""
        if torch.is_grad_enabled():
            return super(FusedScores, self).forward(*args, **kwargs)
        return super().forward(*args, **kwargs)


class FusedDecomposed(FusedScores):
    """Where a method takes the scores apart by rows and columns to add the positions of both."""

    def add_decomposed_rel_pos(self, attn: Any, query: Tensor, *args: Any) -> Any:
        """``[batch * heads, q, k]``, with what the original adds to zeros."""
        nothing = query.new_zeros(()).expand(attn.shape)
        return attn + super().add_decomposed_rel_pos(nothing, query, *args)  # type: ignore[misc]


def is_opened(module: nn.Module) -> bool:
    """Whether a hook on a part (a dropout, a softmax) would see scores that are not written."""
    if torch_module._has_any_global_hook():
        return True
    for part in module.modules():
        inner = part is not module and not isinstance(part, nn.Linear)
        if inner and (is_watched(part) or "_hf_hook" in vars(part)):
            return True
    return False


def is_wanted(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether attention weights that the original returns are read by anybody."""
    place = vars(module)[PLACE]
    return bool(
        kwargs.get(ASKED)
        or (place < len(args) and args[place])
        or getattr(getattr(module, "config", None), ASKED, False)
        or is_watched(module)
        or records_weights(module)
    )


def _written(out: Any) -> Any:
    """Weights that nobody reads are None in the answer, as in that of the host's own SDPA."""
    if isinstance(out, Scores):
        return None if out.normal else out.dense()
    if isinstance(out, Derived):
        return None if out.of.normal else out.dense()
    if type(out) in (tuple, list):
        return type(out)([_written(one) for one in out])
    return out


def scores(model_type: str, *classes: str, mixin: type[Mixin] = FusedScores) -> Architecture:
    """The row of an architecture: its attention classes, with ``module:`` where it is another."""
    return Architecture(
        model_type=model_type,
        replacements=(
            Replacement(
                name=f"{model_type}.attention.scores",
                targets=targets(model_type, classes),
                mixin=mixin,
                gated=True,
            ),
        ),
    )
