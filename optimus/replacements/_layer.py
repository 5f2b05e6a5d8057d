"""A whole decoder layer in one call, where a token is decoded: see ``optimus/ops/decoder.py``."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from optimus.core.backend import Context
from optimus.core.errors import Refusal
from optimus.core.paths import Site
from optimus.core.surgery import Surgeon
from optimus.ops import decoder, step
from optimus.ops.decoder import Parts, Prepared
from optimus.replacements import _steps
from optimus.replacements._steps import known, packed, plain_step, room_for, scales
from optimus.replacements._watch import is_touched

SLOT = "_optimus_prepared"
LAYER = frozenset(("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"))
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
# More sequences at once have work enough for several threads in each part.
MOST_ROWS = 16


class Decoded(_steps.Step):
    """A decoder layer of llama's kind whose seven linear layers are packed alike."""

    names = LAYER
    attends = True
    _modules: dict[str, nn.Module]

    @classmethod
    def accepts(cls, site: Site, context: Context) -> Refusal | None:
        if refusal := super().accepts(site, context):
            return refusal
        parts = site.module._modules
        for name, mixin in PARTS.items():
            part = parts.get(name)
            if part is None or not known(part, mixin):
                return Refusal(f"its {name} is not one that is known here")
        return _steps.Gated.unfit(cast(nn.Module, parts["mlp"])) or _steps.Stepped.unfit(
            cast(nn.Module, parts["self_attn"])
        )

    @classmethod
    def setup(cls, module: nn.Module, surgeon: Surgeon) -> None:
        surgeon.set_attribute(module, SLOT, Prepared())

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        parts = None if args else self._parts(hidden_states, kwargs)
        room = None
        if parts is not None:
            room = room_for(self._modules["self_attn"], hidden_states, kwargs)
        if parts is None or room is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc, no-any-return]
        return decoder.decode(
            vars(self)[SLOT],
            parts,
            hidden_states,
            kwargs["position_embeddings"],
            room,
            kwargs.get("attention_mask"),
        )

    def _parts(self, input: Tensor, kwargs: dict[str, Any]) -> Parts | None:
        """What the layer is made of, where nobody looks inside of it; else None."""
        attention, mlp = (self._modules[name]._modules for name in ("self_attn", "mlp"))
        module = self._modules["self_attn"]
        if not plain_step(module, input, kwargs) or input.shape[0] > MOST_ROWS:
            return None
        norms = self._norms(attention)
        inside = (*self._modules.values(), *(n for n in norms if n is not None), mlp["act_fn"])
        if any(map(is_touched, inside)):
            return None
        linears = [*(attention[name] for name in ATTENTION), *(mlp[name] for name in GATED)]
        weights = packed(linears, input)
        biases = tuple(linear._parameters["bias"] for linear in linears)
        weighed = [None if norm is None else norm._parameters["weight"] for norm in norms]
        if (
            weights is None
            or not decoder.serves(weights, input.dtype)
            or not step.readable(biases)
            or not all(one is None or scales(one, input) for one in weighed)
        ):
            return None
        eps = tuple(0.0 if norm is None else cast(float, norm.variance_epsilon) for norm in norms)
        held = cast(Any, module)
        return Parts(tuple(weights), biases, tuple(weighed), eps, held.head_dim, held.scaling)

    def _norms(self, attention: dict[str, nn.Module]) -> tuple[nn.Module | None, ...]:
        own = self._modules
        of_heads = (attention.get("q_norm"), attention.get("k_norm"))
        return (own["input_layernorm"], own["post_attention_layernorm"], *of_heads)


PARTS = {
    "input_layernorm": _steps.Normed,
    "post_attention_layernorm": _steps.Normed,
    "self_attn": _steps.Stepped,
    "mlp": _steps.Gated,
}
