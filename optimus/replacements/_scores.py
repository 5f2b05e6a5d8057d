"""Attention written out by hand, on the fused kernel: one mixin for every way of writing it.

The model's own forward runs, and its scores are never written (``ops.scores``). So nothing of the
model is copied, and what transformers changes in it is followed; what does not fit one kernel
call is computed as the model computes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from optimus.core.replacement import LENGTHS, Architecture, Mixin, Replacement
from optimus.ops.deferred import Deferred
from optimus.ops.scores import ALWAYS, Scores
from optimus.replacements._watch import is_watched, records_weights

MODELING = "transformers.models.{0}.modeling_{0}:{1}"


class FusedScores(Mixin):
    """Softmax attention of any shape. Weights are written where somebody asks for them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the original; by its own way where somebody reads weights or watches its parts."""
        if _wanted(self, args, kwargs) or _is_opened(self):
            return super().forward(*args, **kwargs)
        with Deferred(getattr(self, LENGTHS, ALWAYS)):
            out = super().forward(*args, **kwargs)
        return _written(out)


class FusedPlainSoftmax(FusedScores):
    """Where the model subtracts the largest score first, lest a softmax in fp16 overflow.

    Softmax does not see it (CogView, Ding et al. 2021, arXiv 2105.13290, section 2.4), and the
    kernels do it themselves.
    """

    def cogview_attention(self, attention_scores: Any, alpha: float = 32) -> Any:
        """Probabilities ``[.., q, k]``."""
        return torch.softmax(attention_scores, dim=-1)


def _is_opened(module: nn.Module) -> bool:
    """Whether a hook on a part (a dropout, a softmax) would see scores that are not written."""
    if torch_module._has_any_global_hook():
        return True
    for part in module.modules():
        inner = part is not module and not isinstance(part, nn.Linear)
        if inner and (is_watched(part) or "_hf_hook" in vars(part)):
            return True
    return False


def _wanted(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether attention weights that the original returns are read by anybody."""
    for one in args:
        if one is True:
            return True
    return bool(
        kwargs.get("output_attentions")
        or getattr(getattr(module, "config", None), "output_attentions", False)
        or is_watched(module)
        or records_weights(module)
    )


def _written(out: Any) -> Any:
    """Weights that nobody reads are None in the answer, as in that of the host's own SDPA."""
    if isinstance(out, Scores):
        return None if out.normal else out.dense()
    if type(out) in (tuple, list):
        return type(out)([_written(one) for one in out])
    return out


def scores(model_type: str, *classes: str, mixin: type[Mixin] = FusedScores) -> Architecture:
    """The row of an architecture: its attention classes, with ``module:`` where it is another."""
    family = model_type.replace("-", "_")
    named = (one if ":" in one else MODELING.format(family, one) for one in classes)
    return Architecture(
        model_type=model_type,
        replacements=(
            Replacement(
                name=f"{model_type}.attention.scores",
                targets=tuple(named),
                mixin=mixin,
                gated=True,
            ),
        ),
    )
