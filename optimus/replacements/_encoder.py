"""Encoders that compute the real tokens of a ragged batch and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from optimus.core.backend import Context
from optimus.core.errors import Refusal
from optimus.core.paths import Site
from optimus.ops.varlen import Ragged
from optimus.replacements._unpadding import Packs, cut, wanted

NOT_PACKED = ("encoder_hidden_states", "past_key_values", "use_cache", "output_attentions")


class Unpadded(Packs):
    """A bidirectional encoder over packed tokens ``[1, total]``; the same outputs, padded again.

    Hidden states at padded positions are zero. Besides the calls that ``Packs`` names, the stock
    path serves one whose rows do not all begin with a real token (a pooler or a head may read
    position 0), and one that wants attentions, a cache or cross-attention. Idea: Zeng et al.,
    Boosting Distributed Training Performance of the Unpadded BERT Model, 2022.
    """

    embeddings: Any

    @classmethod
    def accepts(cls, site: Site, context: Context) -> Refusal | None:
        return super().accepts(site, context) or _unfit_encoder(site) or _unfit_owner(site)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(super().forward, args, kwargs)  # type: ignore[misc]

    def _can_pack(self, inputs: dict[str, Any]) -> bool:
        return not any(wanted(inputs.get(name)) for name in NOT_PACKED)

    def _fits(self, real: Tensor, inputs: dict[str, Any]) -> bool:
        return bool(real[:, 0].all())

    def _unpadded(self, stock: Callable[..., Any], inputs: dict[str, Any], ragged: Ragged) -> Any:
        packed = self._packed(inputs, ragged)
        pieces = [
            stock(**cut(packed, part), sequences=sequences, return_dict=True)
            for part, sequences in self._pieces(ragged)
        ]
        return self._joined(pieces, ragged)

    def _positions(self, inputs: dict[str, Any], ragged: Ragged) -> Tensor:
        table = self.embeddings
        if inputs.get("position_ids") is not None or not hasattr(
            table, "create_position_ids_from_input_ids"
        ):
            return super()._positions(inputs, ragged)
        ids = inputs.get("input_ids")
        if ids is not None:
            made: Tensor = table.create_position_ids_from_input_ids(ids, table.padding_idx)
        else:
            embeds = inputs["inputs_embeds"]
            made = table.create_position_ids_from_inputs_embeds(embeds, table.padding_idx)
        return made

    def _no_mask(self) -> Any:
        return None

    def _joined(self, pieces: list[Any], ragged: Ragged) -> Any:
        output = super()._joined(pieces, ragged)
        if output.get("pooler_output") is not None:
            output["pooler_output"] = self._pool(output["last_hidden_state"])
        return output

    def _pool(self, hidden: Tensor) -> Tensor:
        pooled: Tensor = self.pooler(hidden)  # type: ignore[attr-defined]
        return pooled


def _unfit_encoder(site: Site) -> Refusal | None:
    config = site.module.config
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        return Refusal("it is configured as a decoder")
    if getattr(config, "chunk_size_feed_forward", 0):
        return Refusal("config.chunk_size_feed_forward needs lengths that divide")
    return None


def _unfit_owner(site: Site) -> Refusal | None:
    owner = type(site.owner).__name__ if site.owner is not None else ""
    if owner.endswith("ForQuestionAnswering"):
        return Refusal("the head's softmax runs over padded positions too")
    return None
