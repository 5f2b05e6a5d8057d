"""Encoders that compute the real tokens of a ragged batch and nothing else."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from optimus.core.backend import CPUS, Context
from optimus.core.errors import Refusal
from optimus.core.paths import Site
from optimus.core.replacement import Mixin
from optimus.core.surgery import Surgeon
from optimus.ops.varlen import Ragged
from optimus.replacements._attention import FUSED, OURS, UNPADDED, switch
from optimus.replacements._watch import is_watched

# So many tokens go through the whole encoder at a time: their widest activation stays in the cache
# and below the size that glibc maps afresh, and pages in, for every call. Products lose nothing.
MOST_TOKENS = 1024
PER_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids")
NOT_PACKED = ("encoder_hidden_states", "past_key_values", "use_cache", "output_attentions")


class Unpadded(Mixin):
    """A bidirectional encoder over packed tokens ``[1, total]``; the same outputs, padded again.

    Hidden states at padded positions are zero. The stock path serves a call whose mask is absent,
    all ones or not two-dimensional; whose rows do not all begin with a real token (a pooler or a
    head may read position 0); that wants attentions, a cache or cross-attention; that trains or is
    being traced; and every call while somebody's hook watches an inner module, which would see
    packed tokens. Idea: Zeng et al., Boosting Distributed Training Performance of the Unpadded
    BERT Model, 2022.
    """

    config: Any
    embeddings: Any
    training: bool

    @classmethod
    def accepts(cls, site: Site, context: Context) -> Refusal | None:
        if context.backend.name not in CPUS:
            return Refusal(f"varlen attention is measured on CPUs only, not {context.backend.name}")
        return _unfit_config(site) or _unfit_owner(site)

    @classmethod
    def setup(cls, module: nn.Module, surgeon: Surgeon) -> None:
        eager = module.config._attn_implementation == "eager"
        switch(module, surgeon, FUSED if eager else UNPADDED)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self.training:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        inputs = dict(zip(_names(type(self)), args, strict=False)) | kwargs
        ragged = self._ragged(inputs)
        if ragged is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        as_dict = inputs.pop("return_dict", None)
        stock = super().forward  # type: ignore[misc]
        packed = self._packed(inputs, ragged)
        pieces = [
            stock(**_cut(packed, part), sequences=sequences, return_dict=True)
            for part, sequences in ragged.pieces(MOST_TOKENS)
        ]
        output = self._joined(pieces, ragged)
        wanted = getattr(self.config, "return_dict", True) if as_dict is None else as_dict
        return output if wanted else output.to_tuple()

    def _ragged(self, inputs: dict[str, Any]) -> Ragged | None:
        """The layout of a call that can be packed, or None."""
        mask = inputs.get("attention_mask")
        tokens = inputs.get("input_ids")
        tokens = inputs.get("inputs_embeds") if tokens is None else tokens
        if (
            not isinstance(mask, Tensor)
            or not isinstance(tokens, Tensor)
            or mask.ndim != 2
            or tokens.shape[:2] != mask.shape
            or mask.numel() == 0
            or any(_wanted(inputs.get(name)) for name in NOT_PACKED)
            or self.config.output_attentions
            or self.config._attn_implementation not in OURS
            or torch.jit.is_tracing()
        ):
            return None
        real = mask.bool()
        if bool(real.all()) or not bool(real[:, 0].all()) or self._watched():
            return None
        return Ragged(real)

    def _watched(self) -> bool:
        return any(is_watched(module) for module in self.modules() if module is not self)  # type: ignore[attr-defined]

    def _packed(self, inputs: dict[str, Any], ragged: Ragged) -> dict[str, Any]:
        packed = dict(inputs)
        packed["position_ids"] = ragged.pack(self._positions(inputs, ragged))
        packed["attention_mask"] = self._no_mask()
        for name in PER_TOKEN:
            if isinstance(packed.get(name), Tensor):
                packed[name] = ragged.pack(packed[name])
        return packed

    def _positions(self, inputs: dict[str, Any], ragged: Ragged) -> Tensor:
        """The position ids that the stock model would have used, ``[batch or 1, length]``."""
        if inputs.get("position_ids") is not None:
            given: Tensor = inputs["position_ids"]
            return given
        table = self.embeddings
        if not hasattr(table, "create_position_ids_from_input_ids"):
            return torch.arange(ragged.length, device=ragged.index.device)[None]
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
        """The outputs of all pieces as one output of the padded batch."""

        def join(tensors: Iterable[Tensor]) -> Tensor:
            return ragged.unpack(torch.cat(list(tensors), dim=1))

        output = pieces[0]
        last = output["last_hidden_state"]
        output["last_hidden_state"] = hidden = join(p["last_hidden_state"] for p in pieces)
        if output.get("hidden_states") is not None:
            # One that was not selected is None; the last is the output itself, unless untied.
            output["hidden_states"] = tuple(
                None if states[0] is None else hidden if states[0] is last else join(states)
                for states in zip(*(p["hidden_states"] for p in pieces), strict=True)
            )
        if output.get("pooler_output") is not None:
            output["pooler_output"] = self._pool(hidden)
        return output

    def _pool(self, hidden: Tensor) -> Tensor:
        pooled: Tensor = self.pooler(hidden)  # type: ignore[attr-defined]
        return pooled


def _cut(packed: dict[str, Any], part: slice) -> dict[str, Any]:
    names = (*PER_TOKEN, "position_ids")
    cut = {name: packed[name][:, part] for name in names if isinstance(packed.get(name), Tensor)}
    return packed | cut


def _wanted(value: Any) -> bool:
    return value is not None and value is not False


@functools.cache
def _names(cls: type) -> tuple[str, ...]:
    return tuple(inspect.signature(cls.forward).parameters)[1:]  # type: ignore[attr-defined]


def _unfit_config(site: Site) -> Refusal | None:
    config = getattr(site.module, "config", None)
    name = getattr(config, "_attn_implementation", None)
    if name not in ("eager", "sdpa"):
        return Refusal(f"attention is {name}, which has its own way with padding")
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        return Refusal("it is configured as a decoder")
    if getattr(config, "chunk_size_feed_forward", 0):
        return Refusal("config.chunk_size_feed_forward needs lengths that divide")
    if "position_ids" not in inspect.signature(type(site.module).forward).parameters:
        return Refusal("its forward takes no position_ids")
    return None


def _unfit_owner(site: Site) -> Refusal | None:
    owner = type(site.owner).__name__ if site.owner is not None else ""
    if owner.endswith("ForQuestionAnswering"):
        return Refusal("the head's softmax runs over padded positions too")
    return None
