"""The experts of transformers' mixture-of-experts models, whose weights are three-dimensional.

Every class under ``use_experts_implementation`` is the same computation with four flags
(``has_gate``, ``has_bias``, ``is_transposed``, ``has_post_expert_norm``) and a gate of its own.
Source: transformers/integrations/moe.py, ``grouped_mm_experts_forward``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from optimus.core.backend import Context
from optimus.core.errors import Refusal, SurgeryError
from optimus.core.paths import Site
from optimus.core.replacement import Mixin
from optimus.core.surgery import Surgeon
from optimus.ops.experts import RoutedWeight, routed_linear
from optimus.ops.native import PLAIN
from optimus.ops.quantized import QuantizedWeight, Scheme, importance, unfit
from optimus.replacements._linear import out_of_reach, too_small
from optimus.replacements._quantized import readable, retyped, unfit_hardware, without_kernels
from optimus.replacements._rounding import Rounding, Rounds


class RoundedExperts(Rounding[RoutedWeight]):
    """``[experts, out, in]``, or ``[experts, in, out]`` where the module says so."""

    def __init__(self, scheme: Scheme, key: str) -> None:
        super().__init__(key)
        self.scheme = scheme

    def fits(self, module: nn.Module, weight: nn.Parameter) -> bool:
        """Of a dtype that has kernels, on the CPU, and finite."""
        return self.refuses(module, weight) is None

    def refuses(self, module: nn.Module, weight: nn.Parameter) -> Refusal | None:
        """Why it does not fit."""
        if weight.ndim != 3:
            return Refusal(f"{self.key} has {weight.ndim} dimensions")
        upright = (unfit(readable(one), self.scheme) for one in _upright(module, weight))
        return next((refusal for refusal in upright if refusal is not None), None)

    def round(self, module: nn.Module, weight: Tensor, worth: Tensor | None) -> RoutedWeight:
        """Expert by expert, of which each may have a ``worth`` of its own."""
        experts = _upright(module, weight)
        worths = [None] * len(experts) if worth is None else worth.expand(len(experts), -1)
        pairs = zip(experts, worths, strict=True)
        return RoutedWeight([QuantizedWeight(one, self.scheme, its) for one, its in pairs])

    def retyped(self, codes: RoutedWeight, dtype: torch.dtype) -> RoutedWeight:
        """The same codes; a scale serves every dtype."""
        return RoutedWeight([retyped(one, dtype) for one in codes.experts])

    def opened(self, module: nn.Module, codes: RoutedWeight) -> Tensor:
        """All experts in the stock layout."""
        return _upright(module, codes.dense()).contiguous()


def _upright(module: nn.Module, weight: Tensor) -> Tensor:
    """``[experts, out, in]`` from the table's layout, and back."""
    return weight.transpose(1, 2) if module.is_transposed else weight


class QuantizedExperts(Rounds, Mixin):
    """Experts on rounded weights: only those that a token was routed to are read."""

    scheme: ClassVar[Scheme]
    training: bool
    num_experts: int
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    _is_expert_parallel: bool
    _parameters: dict[str, nn.Parameter]
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]

    @classmethod
    def accepts(cls, site: Site, context: Context) -> Refusal | None:
        module = cast(Any, site.module)
        if module._is_expert_parallel:
            return Refusal("its experts are spread over processes")
        if refusal := unfit_hardware(context):
            return refusal
        for bridge in cls.bridges:
            if refusal := out_of_reach(site, bridge.key):
                return refusal
            weight = cast(nn.Parameter, module._parameters[bridge.key])
            if refusal := too_small(weight) or cast(RoundedExperts, bridge).refuses(module, weight):
                return refusal
        return None

    @classmethod
    def remark(cls) -> str:
        """Where the kernels are not there."""
        return without_kernels()

    @classmethod
    def importance(cls, module: nn.Module, input: Tensor, *others: Any) -> dict[str, Tensor]:
        """What comes into all experts at once, and what comes out of the gate of each."""
        found = super().importance(module, input)
        if len(others) != 2 or len(others[0]) != len(input):
            return found
        stock, (up, down) = cast(Any, module), cls.rounds
        weight, bias = _upright(module, getattr(stock, up)), getattr(stock, f"{up}_bias", None)
        shape = _upright(module, getattr(stock, down)).shape
        found[down] = input.new_zeros(shape[0], shape[-1], dtype=torch.float32)
        gate = stock._apply_gate if stock.has_gate else stock.act_fn
        for expert in others[0].unique().tolist():
            rows = input[(others[0] == expert).any(-1)]
            hidden = gate(linear(rows, weight[expert], None if bias is None else bias[expert]))
            found[down][expert] = importance(hidden) * len(rows)
        return found

    @classmethod
    def setup(cls, module: nn.Module, surgeon: Surgeon) -> None:
        for bridge in cls.bridges:
            bridge.prepare(module, surgeon)

    def forward(self, hidden_states: Tensor, *routing: Any, **named: Any) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self._refuse_training()
        codes = self._ready(hidden_states) if len(routing) == 2 and not named else None
        if codes is None:
            return super().forward(hidden_states, *routing, **named)  # type: ignore[misc, no-any-return]
        chosen, shares = routing
        ids, order = torch.sort(chosen.reshape(-1))
        every = torch.arange(self.num_experts, device=ids.device)
        ends = torch.searchsorted(ids, every, right=True)
        rows = hidden_states[order // chosen.shape[-1]]
        out = self._gated(self._product(rows, codes[0], ids, ends))
        out = self._product(out, codes[1], ids, ends)
        if self.has_post_expert_norm:
            out = self.post_expert_norm(out)
        out = out * shares.reshape(-1)[order].unsqueeze(-1)
        out = out[order.argsort()].view(*chosen.shape, -1).sum(1)
        return out.to(hidden_states.dtype)

    def _gated(self, out: Tensor) -> Tensor:
        gate: Callable[[Tensor], Tensor] = self._apply_gate if self.has_gate else self.act_fn  # type: ignore[attr-defined]
        return gate(out)

    def _product(
        self, rows: Tensor, codes: tuple[str, RoutedWeight], ids: Tensor, ends: Tensor
    ) -> Tensor:
        key, weight = codes
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and rows.requires_grad):
            out = routed_linear(rows, weight.handle, ends, weight.out_features)
        else:
            out = weight.matmul(rows, ends)
        return out + self._parameters[f"{key}_bias"][ids] if self.has_bias else out

    def _ready(self, input: Tensor) -> list[tuple[str, RoutedWeight]] | None:
        """The codes of both products, where they may serve this call; None for the stock path."""
        tracing = torch.compiler.is_compiling()
        if tracing and torch.compiler.is_exporting():
            raise SurgeryError(
                "rounded experts cannot be exported: their layout is this machine's own. "
                "Call optimus.reverse(model) first, or export from the stock model."
            )
        if (
            self._is_expert_parallel
            or input.ndim != 2
            or (not tracing and type(input) not in PLAIN)
            or input.device.type != "cpu"
            or torch.is_autocast_enabled("cpu")
        ):
            return None
        module = cast(nn.Module, self)
        found = []
        for bridge in self.bridges:
            codes = bridge.state(module).packed if tracing else bridge.ready(module)
            if codes is None or codes.dtype is not input.dtype:
                return None
            found.append((bridge.key, codes))
        return found

    def _refuse_training(self) -> None:
        if any(self._parameters[bridge.key].requires_grad for bridge in self.bridges):
            raise SurgeryError(
                "these experts are rounded for inference, and in training mode their weights would "
                "get no gradient. Call model.eval() to infer, or optimus.reverse(model) to train."
            )


def _lent(key: str) -> property:
    """The parameter of that name, as a dense one."""

    def read(self: QuantizedExperts) -> nn.Parameter:
        bridge = next(bridge for bridge in self.bridges if bridge.key == key)
        return bridge.lend(cast(nn.Module, self))

    return property(read)


def experts_rounding_to(scheme: Scheme, name: str, keys: tuple[str, str]) -> type[QuantizedExperts]:
    """The mixin of that scheme, for experts whose products are by ``keys``, in order."""
    body = {
        "__doc__": QuantizedExperts.__doc__,
        "__module__": __name__,
        "scheme": scheme,
        "rounds": keys,
        "bridges": tuple(RoundedExperts(scheme, key) for key in keys),
        "calibrates": scheme.bits == 4,
        "forward": QuantizedExperts.forward,
    }
    return type(name, (QuantizedExperts,), body | {key: _lent(key) for key in keys})
