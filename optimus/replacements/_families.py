"""Rows that several architectures have in common, so that a file holds only what differs."""

from __future__ import annotations

from typing import Any

from optimus.core.backend import CPUS, Mode
from optimus.core.replacement import Mixin, Replacement
from optimus.replacements._attention import FusedAttention
from optimus.replacements._encoder import Unpadded
from optimus.replacements._graph import UnpaddedGraph
from optimus.replacements._unpadding import PACKED_ON

# The sizes of a model that the laws build in a second: two layers, wide enough to pack.
ENCODER: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
DECODER: dict[str, Any] = {**ENCODER, "num_key_value_heads": 2, "pad_token_id": 0}

MODELING = "transformers.models.{0}.modeling_{0}:{1}"


def targets(model_type: str, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Classes of the type's own modeling file, or of another where a name has a ``module:``."""
    family = model_type.replace("-", "_")
    return tuple(one if ":" in one else MODELING.format(family, one) for one in classes)


def unpadded(family: str, model: str, *, mixin: type[Mixin] = Unpadded) -> Replacement:
    """The encoder ``model`` of the modeling file of ``family``, over packed tokens."""
    return Replacement(
        name=f"{family}.encoder.unpadded",
        targets=(MODELING.format(family, model),),
        mixin=mixin,
        modes=frozenset({Mode.INFERENCE}),
        backends=PACKED_ON,
    )


def unpadded_graph(family: str, model: str) -> Replacement:
    """The encoder ``model`` of the modeling file of ``family``, for exporters."""
    return Replacement(
        name=f"{family}.encoder.unpadded-graph",
        targets=(MODELING.format(family, model),),
        mixin=UnpaddedGraph,
        modes=frozenset({Mode.EXPORT}),
        backends=CPUS,
    )


def fused(
    family: str,
    *models: str,
    folder: str | None = None,
    mixin: type[FusedAttention] = FusedAttention,
) -> Replacement:
    """Fused attention in place of eager in ``models`` of the modeling file of ``family``, which is
    in ``folder`` where that has another name.

    A model is a class that owns the config that its attention layers read: in an encoder-decoder
    each stack, in a composite each part.
    """
    module = f"transformers.models.{folder or family}.modeling_{family}"
    return Replacement(
        name=f"{family}.attention.fused",
        targets=tuple(f"{module}:{model}" for model in models),
        mixin=mixin,
        gated=True,
    )
