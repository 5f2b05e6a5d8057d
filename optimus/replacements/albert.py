"""ALBERT: one layer used many times, and a pooler that is a bare linear layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from optimus.core.replacement import Architecture
from optimus.replacements._encoder import Unpadded as UnpaddedEncoder
from optimus.replacements._families import ENCODER, fused, unpadded


class Unpadded(UnpaddedEncoder):
    """The pooler is applied by the model, not by a module of its own."""

    def _pool(self, hidden: Tensor) -> Tensor:
        pooled: Tensor = self.pooler_activation(self.pooler(hidden[:, 0]))  # type: ignore[attr-defined]
        return pooled


def tiny() -> Any:
    """One layer used twice, wide enough to pack."""
    from transformers import AlbertConfig

    return AlbertConfig(**ENCODER, embedding_size=128)


ARCHITECTURE = Architecture(
    model_type="albert",
    tiny=tiny,
    heads=("AutoModel", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"),
    replacements=(
        unpadded("albert", "AlbertModel", mixin=Unpadded),
        fused("albert", "AlbertModel"),
    ),
)
