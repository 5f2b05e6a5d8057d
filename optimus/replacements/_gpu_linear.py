"""Linear layers on a weight of 8 or 4 bits on CUDA, in the layouts of ``ops.weights``.

What a rounded layer does when it is read, written to, saved or moved is what it does on a CPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from optimus.core.backend import Context
from optimus.core.errors import Refusal
from optimus.core.paths import Site
from optimus.ops.weights import Int4Weight, made_of, moved
from optimus.replacements._linear import PLAIN, out_of_reach, too_small
from optimus.replacements._quantized import Quantized, upright
from optimus.replacements._rounding import Rounding


class TiledWeight(Rounding[Any]):
    """``weight`` of a linear layer in one of the layouts."""

    def __init__(self, layout: type[Any]) -> None:
        super().__init__("weight")
        self.layout = layout

    def fits(self, module: nn.Module, weight: nn.Parameter) -> bool:
        """Where there is such a product: a weight on meta, or moved elsewhere, stays dense."""
        return not weight.is_meta and self.layout.unfit(upright(module, weight)) is None

    def round(self, module: nn.Module, weight: Tensor, worth: Tensor | None) -> Any:
        """One weight."""
        return made_of(self.layout, upright(module, weight), worth)

    def retyped(self, codes: Any, dtype: torch.dtype) -> Any:
        """The same codes; only of 8 bits is there more than one dtype."""
        return dataclasses.replace(codes, dtype=dtype, scale=codes.scale.to(dtype))

    def opened(self, module: nn.Module, codes: Any) -> Tensor:
        """``[out, in]``, or ``[in, out]`` for ``Conv1D``."""
        return upright(module, codes.dense()).contiguous()

    def _codes(self, module: nn.Module, weight: nn.Parameter) -> Any:
        state = self.state(module)
        if state.codes is not None:
            state.codes = moved(state.codes, weight.device)
        return super()._codes(module, weight)


class OnTensorCores(Quantized):
    """``nn.Linear`` or ``Conv1D`` on a rounded weight, by products that torch has for GPUs."""

    feature: ClassVar[str]
    needs: ClassVar[str]
    packing: ClassVar[TiledWeight]  # type: ignore[assignment]

    @classmethod
    def accepts(cls, site: Site, context: Context) -> Refusal | None:
        if cls.feature not in context.backend.features:
            return Refusal(f"this GPU, or this torch, has no {cls.needs}", hardware=True)
        if refusal := out_of_reach(site, "weight"):
            return refusal
        weight = site.module._parameters["weight"]
        assert weight is not None
        # Too small is said of what could be rounded, and only of that.
        return cls.packing.layout.unfit(upright(site.module, weight)) or too_small(weight)

    @classmethod
    def remark(cls) -> str:
        """The CPU's is about its own kernels."""
        return ""

    def _product(self, input: Tensor, packed: Any) -> Tensor:
        out: Tensor = packed.matmul(input, self.bias)
        return out

    def _serves(self, input: Tensor, packed: Any) -> bool:
        return (
            type(input) in PLAIN
            and self._takes(input, packed)
            and not torch.is_autocast_enabled(input.device.type)
            and not torch.jit.is_tracing()
        )

    def _takes(self, input: Tensor, packed: Any) -> bool:
        return bool(
            input.dtype is packed.dtype
            and input.device == packed.codes.device
            and input.shape[-1] == packed.in_features
            and input.numel() > 0
        )


def rounding_to(layout: type[Any], name: str, feature: str, needs: str) -> type[OnTensorCores]:
    """The mixin of that layout, where the backend has ``feature``."""
    packing = TiledWeight(layout)
    body = {
        "__doc__": OnTensorCores.__doc__,
        "__module__": __name__,
        "feature": feature,
        "needs": needs,
        "packing": packing,
        "bridges": (packing,),
        "calibrates": issubclass(layout, Int4Weight),
    }
    return type(name, (OnTensorCores,), body)
