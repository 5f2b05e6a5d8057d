"""Encoders whose exported graph computes the real tokens of a ragged batch and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optimus.core.backend import Context
from optimus.core.errors import Refusal
from optimus.core.paths import Site
from optimus.ops.packed import PackedGraph
from optimus.replacements._encoder import Unpadded

GIVEN = frozenset({"input_ids", "attention_mask", "token_type_ids", "return_dict"})


class UnpaddedGraph(Unpadded):
    """``Unpadded`` for a graph, which cannot choose: every call with a mask is packed.

    What is computed at position 0 is stock's also where a row begins with padding. Stock serves
    calls that are not captured, and those with other inputs than words, their kinds and a mask.
    """

    @classmethod
    def accepts(cls, site: Site, context: Context) -> Refusal | None:
        if getattr(site.module.config, "output_hidden_states", False):
            return Refusal("the config asks for hidden states")
        return super().accepts(site, context)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.captured(super(Unpadded, self).forward, args, kwargs)  # type: ignore[misc]

    def captured(self, stock: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The stock answer, by way of packed tokens while a graph is captured."""
        asked = {name for name, value in kwargs.items() if value is not None}
        if args or not torch.compiler.is_exporting() or not _packable(asked, kwargs):
            return stock(*args, **kwargs)
        inputs = dict(kwargs)
        layout = PackedGraph(inputs["attention_mask"])
        packed = self._packed(inputs, layout)  # type: ignore[arg-type]
        packed["return_dict"] = True
        output = stock(**packed, sequences=layout)
        output["last_hidden_state"] = layout.unpack(output["last_hidden_state"])
        if output.get("pooler_output") is not None:
            output["pooler_output"] = self._pool(output["last_hidden_state"])
        return output


def _packable(asked: set[str], kwargs: dict[str, Any]) -> bool:
    mask = kwargs.get("attention_mask")
    flags = {name for name in asked if kwargs[name] is False}
    return (
        isinstance(mask, Tensor)
        and mask.ndim == 2
        and "input_ids" in asked
        and (asked - flags <= GIVEN)
    )
