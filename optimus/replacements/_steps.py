"""Parts of a decoder layer in one call each, where a token is decoded: see ``optimus/ops/step.py``.

Whoever looks at what is left out (a hook on a projection, a recorder of weights, a compiler, a
gradient) gets the model's own forward for that call.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor, nn

from optimus.core.backend import Context
from optimus.core.errors import Refusal
from optimus.core.paths import Site
from optimus.core.replacement import Mixin
from optimus.ops import native, step
from optimus.ops.native import PLAIN
from optimus.replacements._attention import GROUPED
from optimus.replacements._linear import Packed
from optimus.replacements._watch import is_touched, records_weights

SILU = ("SiLU", "SiLUActivation")
# What the forwards that are replaced do, as the names that their code uses.
NORM = frozenset(
    ("dtype", "float32", "mean", "pow", "rsqrt", "to", "torch", "variance_epsilon", "weight")
)
GATED = frozenset(("act_fn", "down_proj", "gate_proj", "up_proj"))
ATTENTION = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "o_proj", "apply_rotary_pos_emb", "update"),
        *("view", "transpose", "reshape", "shape", "contiguous"),
        *("ALL_ATTENTION_FUNCTIONS", "get_interface", "eager_attention_forward"),
        *("config", "_attn_implementation", "attention_dropout", "training"),
        *("head_dim", "layer_idx", "scaling"),
    )
)
# What some of them say besides: the window is in the mask, and norms are called here, too.
BESIDES = frozenset(("sliding_window", "getattr", "q_norm", "k_norm"))
TURNS = frozenset(("rotate_half", "unsqueeze"))
HALVES = frozenset(("cat", "shape", "torch"))
# Arguments that are read here, or by nobody on SDPA.
READ = frozenset(
    (
        *("position_embeddings", "attention_mask", "past_key_values", "position_ids"),
        *("use_cache", "cache_position", "output_hidden_states"),
    )
)


class Step(Mixin):
    """A forward whose text is known, replaced where the compiled kernels are."""

    names: frozenset[str]
    besides: frozenset[str] = frozenset()

    @classmethod
    def accepts(cls, site: Site, context: Context) -> Refusal | None:
        if not native.steps():
            why = native.available() or "this processor has no AVX-512"
            return Refusal(f"no compiled kernel for it: {why}", hardware=True)
        if not known(site.module, cls):
            used = _names(type(site.module).forward)
            odd = ", ".join(sorted(used - cls.names)) or "some of it is missing"
            return Refusal(f"its forward is not the one that is known here: {odd}")
        return cls.unfit(site.module)

    @classmethod
    def unfit(cls, module: nn.Module) -> Refusal | None:
        """What else about this module the kernel does not do."""
        return None


def known(module: nn.Module, mixin: type[Step]) -> bool:
    """Whether the module's own forward is the one that ``mixin`` replaces."""
    return mixin.names <= _names(type(module).forward) <= mixin.names | mixin.besides


def _names(function: Callable[..., Any] | None) -> frozenset[str]:
    code = getattr(inspect.unwrap(function) if function else None, "__code__", None)
    return frozenset(code.co_names) if isinstance(code, CodeType) else frozenset()


def plain(input: Tensor) -> bool:
    """Whether a kernel may read this tensor, and nobody else waits for the operators."""
    return (
        native.unobserved()
        and type(input) is Tensor
        and not torch.is_grad_enabled()
        and input.dtype in native.DTYPES
        and input.device.type == "cpu"
        and input.is_contiguous()
        and input.numel() > 0
        and not nn.modules.module._has_any_global_hook()
    )


def scales(weight: nn.Parameter, input: Tensor) -> bool:
    """Whether a kernel may read the weight of a norm: a part of one has other memory."""
    return type(weight) in PLAIN and weight.dtype is input.dtype


def packed(linears: Iterable[nn.Module], input: Tensor) -> list[Any] | None:
    """The packed weights of linear layers that nobody watches; None if one is not so."""
    found = []
    for linear in linears:
        if not isinstance(linear, Packed) or is_touched(cast(nn.Module, linear)):
            return None
        weight = linear.at_hand() or linear._ready(input)
        if weight is None or weight.dtype is not input.dtype:
            return None
        found.append(weight)
    return found


class Normed(Step):
    """``RMSNorm`` as llama has it. 2048 wide, one row: 4 us for 24."""

    names = NORM
    variance_epsilon: float
    _parameters: dict[str, nn.Parameter]

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self._parameters["weight"]
        if not plain(hidden_states) or not scales(weight, hidden_states):
            return super().forward(hidden_states)  # type: ignore[misc, no-any-return]
        return step.rms_norm(hidden_states, weight, self.variance_epsilon)


class Gated(Step):
    """``down(silu(gate(x)) * up(x))``: the input is rounded once, and the gate is one pass."""

    names = GATED
    _modules: dict[str, nn.Module]

    @classmethod
    def unfit(cls, module: nn.Module) -> Refusal | None:
        """Where the gate is another function."""
        activation = type(getattr(module, "act_fn", None)).__name__
        if activation not in SILU:
            return Refusal(f"its gate is {activation}, and the kernel's is SiLU")
        return None

    def forward(self, x: Tensor) -> Tensor:
        parts = self._modules
        both = (parts["gate_proj"], parts["up_proj"])
        weights = None
        if plain(x) and not is_touched(parts["act_fn"]):
            weights = packed(both, x)
        if weights is None:
            return super().forward(x)  # type: ignore[misc, no-any-return]
        biases = [linear._parameters["bias"] for linear in both]
        opened, up = step.products(x, weights, biases)
        return cast(Tensor, parts["down_proj"](step.gate(opened, up)))


class Stepped(Step):
    """Attention of one new token a sequence, over a cache with room (``cpu.cache``)."""

    names = ATTENTION
    besides = BESIDES
    attends = True
    _modules: dict[str, nn.Module]
    head_dim: int
    scaling: float

    @classmethod
    def unfit(cls, module: nn.Module) -> Refusal | None:
        """Where positions are another rotation."""
        host = sys.modules[type(module).__module__]
        turn, halves = (getattr(host, n, None) for n in ("apply_rotary_pos_emb", "rotate_half"))
        if _names(turn) != TURNS or _names(halves) != HALVES:
            return Refusal("it turns queries and keys in a way of its own")
        return None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        room = None
        if not args and plain_step(cast(nn.Module, self), hidden_states, kwargs):
            room = room_for(cast(nn.Module, self), hidden_states, kwargs)
        if room is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        query, key, value = self._projected(hidden_states)
        keys, values, past = room
        out = step.attend(
            *(query, key, value),
            kwargs["position_embeddings"],
            (keys, values),
            past,
            scale=self.scaling,
            mask=kwargs.get("attention_mask"),
        )
        return self._modules["o_proj"](out), None

    def _projected(self, input: Tensor) -> list[Tensor]:
        parts = self._modules
        linears = [parts[name] for name in ("q_proj", "k_proj", "v_proj")]
        weights = packed(linears, input)
        if weights is None:
            found = [cast(Tensor, linear(input)) for linear in linears]
        else:
            biases = [linear._parameters["bias"] for linear in linears]
            found = step.products(input, weights, biases)
        if "q_norm" in parts:
            heads = (*input.shape[:-1], -1, self.head_dim)
            for place, name in enumerate(("q_norm", "k_norm")):
                found[place] = parts[name](found[place].view(heads)).flatten(-2)
        return [one if one.is_contiguous() else one.contiguous() for one in found]


def plain_step(attention: nn.Module, input: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether this is one new token a sequence, of which nobody wants more than the answer."""
    return (
        plain(input)
        and input.ndim == 3
        and input.shape[1] == 1
        and not attention.training
        and cast(Any, attention).config._attn_implementation in ("sdpa", GROUPED)
        and all(name in READ or not value for name, value in kwargs.items())
        and not records_weights(attention)
    )


def room_for(
    attention: nn.Module, input: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, int] | None:
    """Where the new token goes, in a cache of ours that has room for it. From then on it counts as
    written."""
    layers = getattr(kwargs.get("past_key_values"), "layers", ())
    turns, own = kwargs.get("position_embeddings"), cast(Any, attention)
    reserve = None
    if own.layer_idx < len(layers):
        reserve = getattr(layers[own.layer_idx], "reserve", None)
    if reserve is None or turns is None:
        return None
    cos, sin = turns
    batch, shape = input.shape[0], (1, own.head_dim)
    if (
        cos.shape[0] not in (1, batch)
        or cos.shape[1:] != shape
        or cos.dtype is not input.dtype
        or not (cos.is_contiguous() and sin.is_contiguous())
    ):
        return None
    mask = kwargs.get("attention_mask")
    return cast("tuple[Tensor, Tensor, int] | None", reserve(batch, input.dtype, mask))
