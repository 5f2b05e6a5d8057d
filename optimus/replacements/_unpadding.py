"""Models that compute the real tokens of a ragged batch and nothing else: what they share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from optimus.core.backend import CPUS, Context
from optimus.core.errors import Refusal
from optimus.core.paths import Site
from optimus.core.replacement import Mixin
from optimus.core.surgery import Surgeon
from optimus.ops.varlen import HALVES, Ragged, Sequences, packs_heads
from optimus.replacements._attention import FUSED, OURS, UNPADDED, switch
from optimus.replacements._watch import is_watched

# So many tokens go through the whole model at a time: their widest activation stays in the cache
# and below the size that glibc maps afresh, and pages in, for every call. Products lose nothing.
MOST_TOKENS = 1024
PACKED_ON = CPUS | {"cuda"}
PER_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids")


class Packs(Mixin):
    """A model over packed tokens ``[1, total]``; the same outputs, padded again.

    The stock path serves a call whose mask is absent, all ones or not two-dimensional; that is
    traced or trains; and every call while somebody's hook watches an inner module, which would
    see packed tokens.
    """

    attends = True
    config: Any
    training: bool

    @classmethod
    def accepts(cls, site: Site, context: Context) -> Refusal | None:
        return unfit_kernel(site, context) or unfit_config(site)

    @classmethod
    def setup(cls, module: nn.Module, surgeon: Surgeon) -> None:
        eager = module.config._attn_implementation == "eager"
        switch(module, surgeon, FUSED if eager else UNPADDED)

    def call(self, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``stock`` would answer, by way of packed tokens where the call can be packed."""
        if torch.compiler.is_compiling() or self.training:
            return stock(*args, **kwargs)
        inputs = dict(zip(_names(type(self)), args, strict=False)) | kwargs
        ragged = self._ragged(inputs)
        if ragged is None:
            return stock(*args, **kwargs)
        as_dict = inputs.pop("return_dict", None)
        output = self._unpadded(stock, inputs, ragged)
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
            or not self._can_pack(inputs)
            or self.config.output_attentions
            or self.config._attn_implementation not in OURS
            or torch.jit.is_tracing()
        ):
            return None
        real = mask.bool()
        if bool(real.all()) or not self._fits(real, inputs) or self._watched():
            return None
        return Ragged(real)

    def _pieces(self, ragged: Ragged, *, causal: bool = False) -> Iterator[tuple[slice, Sequences]]:
        """How much goes through the model at a time; all of it where it is no cache that counts."""
        everything = max(1, sum(ragged.lengths))
        most = MOST_TOKENS if ragged.index.device.type == "cpu" else everything
        return ragged.pieces(most, causal=causal)

    def _can_pack(self, inputs: dict[str, Any]) -> bool:
        """Whether nothing is asked for that needs the padded layout."""
        raise NotImplementedError

    def _fits(self, real: Tensor, inputs: dict[str, Any]) -> bool:
        """Whether nothing will be read where there is no token."""
        raise NotImplementedError

    def _watched(self) -> bool:
        return any(is_watched(module) for module in self.modules() if module is not self)  # type: ignore[attr-defined]

    def _unpadded(self, stock: Callable[..., Any], inputs: dict[str, Any], ragged: Ragged) -> Any:
        """The output of the padded batch, by packed calls of ``stock``."""
        raise NotImplementedError

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
        given: Tensor | None = inputs.get("position_ids")
        if given is not None:
            return given
        return torch.arange(ragged.length, device=ragged.index.device)[None]

    def _no_mask(self) -> Any:
        """What the model takes for a mask, and makes nothing of."""
        raise NotImplementedError

    def _joined(self, pieces: list[Any], ragged: Ragged) -> Any:
        """The hidden states of all pieces as those of the padded batch, in the first output."""
        output = pieces[0]
        last, hidden = output.get("last_hidden_state"), None
        if last is not None:
            hidden = ragged.unpack(*(piece["last_hidden_state"] for piece in pieces))
            output["last_hidden_state"] = hidden
        if output.get("hidden_states") is not None:
            # One that was not selected is None; the last is the output itself, unless untied.
            output["hidden_states"] = tuple(
                None if one[0] is None else hidden if one[0] is last else ragged.unpack(*one)
                for one in zip(*(piece["hidden_states"] for piece in pieces), strict=True)
            )
        return output


def cut(packed: dict[str, Any], part: slice) -> dict[str, Any]:
    """The arguments for those of the packed tokens."""
    names = (*PER_TOKEN, "position_ids")
    pieces = {name: packed[name][:, part] for name in names if isinstance(packed.get(name), Tensor)}
    return packed | pieces


def wanted(value: Any) -> bool:
    """Whether an optional argument asks for something."""
    return value is not None and value is not False


@functools.cache
def _names(cls: type) -> tuple[str, ...]:
    return tuple(inspect.signature(cls.forward).parameters)[1:]  # type: ignore[attr-defined]


def unfit_kernel(site: Site, context: Context) -> Refusal | None:
    """Where sequences would be attended to one by one, on a device that has no time for that."""
    backend = context.backend
    if backend.name in CPUS:
        return None
    if "packed-attention" not in backend.features:
        why = "this torch, or this GPU, has no attention over packed sequences"
        return Refusal(why, hardware=True)
    if context.dtype not in HALVES:
        found = str(context.dtype).removeprefix("torch.")
        return Refusal(f"attention over packed sequences is for bf16 and fp16, not {found}")
    config = site.module.config
    heads = getattr(config, "num_attention_heads", 0) or 1
    dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    return None if packs_heads(dim) else Refusal(f"heads of {dim} have no packed attention")


def unfit_config(site: Site) -> Refusal | None:
    """Why attention or the arguments of this model have no way around padding."""
    config = getattr(site.module, "config", None)
    name = getattr(config, "_attn_implementation", None)
    if name not in ("eager", "sdpa"):
        return Refusal(f"attention is {name}, which has its own way with padding")
    if "position_ids" not in inspect.signature(type(site.module).forward).parameters:
        return Refusal("its forward takes no position_ids")
    return None
