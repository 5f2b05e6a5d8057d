"""Rows that several architectures have in common, so that a file holds only what differs."""

from __future__ import annotations

from optimus.core.backend import CPUS, Mode
from optimus.core.replacement import Mixin, Replacement
from optimus.replacements._attention import FusedAttention
from optimus.replacements._encoder import Unpadded

MODELING = "transformers.models.{0}.modeling_{0}:{1}"


def unpadded(family: str, model: str, *, mixin: type[Mixin] = Unpadded) -> Replacement:
    """The encoder ``model`` of the modeling file of ``family``, over packed tokens."""
    return Replacement(
        name=f"{family}.encoder.unpadded",
        targets=(MODELING.format(family, model),),
        mixin=mixin,
        modes=frozenset({Mode.INFERENCE}),
        backends=CPUS,
    )


def fused(family: str, model: str) -> Replacement:
    """Fused attention in place of eager in ``model`` of the modeling file of ``family``."""
    return Replacement(
        name=f"{family}.attention.fused",
        targets=(MODELING.format(family, model),),
        mixin=FusedAttention,
        backends=CPUS,
    )
