"""Linear layers on a weight of 8 or 4 bits.

A head that shares its weight with an embedding gets codes of its own, and the shared tensor stays
where it is: nothing is untied, at the cost of the codes.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from optimus.core.backend import Context
from optimus.core.canonical import Placeholder
from optimus.core.errors import Refusal
from optimus.core.paths import Site
from optimus.core.surgery import Surgeon
from optimus.ops import native
from optimus.ops.linear import PackedWeight
from optimus.ops.quantized import QuantizedWeight, Scheme, unfit
from optimus.replacements._linear import Packed, out_of_reach, too_small
from optimus.replacements._rounding import Rounding, Rounds


class RoundedWeight(Rounding[QuantizedWeight]):
    """``weight`` of a linear layer."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__("weight")
        self.scheme = scheme

    def fits(self, module: nn.Module, weight: nn.Parameter) -> bool:
        """Of a dtype that has kernels, on the CPU, and finite."""
        return unfit(upright(module, weight), self.scheme) is None

    def round(self, module: nn.Module, weight: Tensor, worth: Tensor | None) -> QuantizedWeight:
        """One weight."""
        return QuantizedWeight(upright(module, weight), self.scheme, worth)

    def retyped(self, codes: QuantizedWeight, dtype: torch.dtype) -> QuantizedWeight:
        """The same codes; a scale serves every dtype."""
        return retyped(codes, dtype)

    def opened(self, module: nn.Module, codes: QuantizedWeight) -> Tensor:
        """``[out, in]``, or ``[in, out]`` for ``Conv1D``."""
        return upright(module, codes.dense()).contiguous()


def retyped(codes: QuantizedWeight, dtype: torch.dtype) -> QuantizedWeight:
    """The same codes for a weight of another dtype."""
    twin = copy.deepcopy(codes)
    twin.dtype = dtype
    return twin


def upright(module: nn.Module, weight: Tensor) -> Tensor:
    """``[out, in]`` from the table's layout, and back: ``Conv1D`` stores its transpose."""
    return weight if isinstance(module, nn.Linear) else weight.t()


def readable(weight: Tensor) -> Tensor:
    """What can be said of a weight ``[out, in]`` that is still on meta: all but its numbers."""
    if not weight.is_meta:
        return weight
    return torch.zeros(1, weight.shape[1], dtype=weight.dtype)


def unfit_hardware(context: Context) -> Refusal | None:
    """Where the kernels have no instruction of their own, they are slower than fp32."""
    if "int8-products" in context.backend.features:
        return None
    return Refusal(
        "this processor has no AVX512-VNNI, and rounded products without it run at 2 to 8 GFLOP/s "
        "(Xeon, one thread), less than a tenth of fp32",
        hardware=True,
    )


def without_kernels() -> str:
    """What it means where the compiled kernels are missing: the memory is saved, and no time."""
    reason = native.available()
    return f"slower than fp32, by torch's own operators: the kernels are {reason}" if reason else ""


class Quantized(Rounds, Packed):
    """``nn.Linear`` or ``Conv1D`` on a rounded weight.

    ``module.weight`` reads as the rounded values in the stock layout and dtype; what is written
    into it is rounded again, and survives the reverse as written.
    """

    rounds = ("weight",)
    scheme: ClassVar[Scheme]
    packing: ClassVar[RoundedWeight]  # type: ignore[assignment]

    @classmethod
    def accepts(cls, site: Site, context: Context) -> Refusal | None:
        if refusal := unfit_hardware(context) or out_of_reach(site, "weight"):
            return refusal
        weight = cast(nn.Parameter, site.module._parameters["weight"])
        if weight.ndim != 2:
            return Refusal(f"weight has {weight.ndim} dimensions")
        return too_small(weight) or unfit(readable(upright(site.module, weight)), cls.scheme)

    @classmethod
    def remark(cls) -> str:
        """Where the kernels are not there."""
        return without_kernels()

    @classmethod
    def allows_tie(cls, other: nn.Module) -> bool:
        """A head has codes of its own, and the embedding goes on reading what they share."""
        return isinstance(other, nn.Embedding)

    @classmethod
    def setup(cls, module: nn.Module, surgeon: Surgeon) -> None:
        cls.packing.prepare(module, surgeon)

    @property
    def _packed(self) -> Any:
        return self.packing.state(cast(nn.Module, self)).packed

    @_packed.setter
    def _packed(self, packed: Any) -> None:
        self.packing.state(cast(nn.Module, self)).packed = packed

    def at_hand(self) -> PackedWeight | None:
        """The codes, where nobody holds or replaced the dense weight; None says no more."""
        # A shared weight may have been written to, which only _ready finds out.
        state = vars(self)[self.packing.slot]
        away = type(self._parameters["weight"]) is Placeholder
        return state.packed if away and state.original is not None else None

    def _ready(self, input: Tensor) -> PackedWeight | None:
        state = self.packing.state(cast(nn.Module, self))
        if (state.packed is None or state.original is None) and self._repack() is None:
            return None
        return super()._ready(input)

    def _is_lent_another(self) -> bool:
        return self.packing.is_another(cast(nn.Module, self))

    def _repack(self) -> Any:
        return self.packing.ready(cast(nn.Module, self))


def rounding_to(scheme: Scheme, name: str) -> type[Quantized]:
    """The mixin of that scheme."""
    packing = RoundedWeight(scheme)
    body = {
        "__doc__": Quantized.__doc__,
        "__module__": __name__,
        "scheme": scheme,
        "packing": packing,
        "bridges": (packing,),
        "calibrates": scheme.bits == 4,
    }
    return type(name, (Quantized,), body)
