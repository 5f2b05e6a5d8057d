"""Linear layers whose weight waits in oneDNN's or our own layout, and nowhere else."""

from __future__ import annotations

import sys
import threading
from typing import Any, cast

import torch
from torch import Tensor, nn

from optimus.core.backend import Context
from optimus.core.canonical import Placeholder, like, placeholder
from optimus.core.errors import Refusal, SurgeryError
from optimus.core.paths import Site
from optimus.core.replacement import Mixin
from optimus.core.surgery import Surgeon
from optimus.ops.held import held_linear
from optimus.ops.linear import PackedWeight
from optimus.ops.native import PLAIN

# Below this many weights the call into oneDNN (some 30 us) costs more than the blocking saves.
SMALLEST = 65_536
# A weight that is read this often between calls is read by the model itself: packing it again
# each time would cost more than it saves.
PATIENCE = 4
# Table and packed form change together: a thread must not find one without the other.
LOCK = threading.RLock()


class Packing:
    """The bridge between a dense ``weight`` and its blocked form."""

    def __init__(self, *, transposed: bool) -> None:
        self.transposed = transposed

    def fold(self, module: nn.Module) -> None:
        """Pack the weight; one that oneDNN cannot take (moved, recast) stays dense."""
        with LOCK:
            weight = cast(nn.Parameter, module._parameters["weight"])
            instance = vars(module)
            instance.setdefault("_lent", 0)
            instance.setdefault("_packed", None)
            if isinstance(weight, Placeholder) or not packable(weight):
                return
            instance["_packed"] = PackedWeight(weight.t() if self.transposed else weight)
            module._parameters["weight"] = placeholder(weight)

    def unfold(self, module: nn.Module) -> None:
        """The dense weight back in the table, bit for bit."""
        self.lend(module)
        for name in ("_packed", "_lent"):
            vars(module).pop(name, None)

    def lend(self, module: nn.Module) -> nn.Parameter:
        """The weight as a dense parameter, in the table; the packed form is dropped."""
        weight = cast(nn.Parameter, module._parameters["weight"])
        if not isinstance(weight, Placeholder):
            return weight
        with LOCK:
            weight = cast(nn.Parameter, module._parameters["weight"])
            if isinstance(weight, Placeholder):
                weight = module._parameters["weight"] = like(weight, self.dense(module))
                vars(module)["_packed"] = None
            return weight

    def dense(self, module: nn.Module) -> Tensor:
        """A new stock tensor; the module stays packed."""
        # A weight that came to be in inference mode could never be trained.
        with torch.inference_mode(mode=False):
            dense = cast(PackedWeight, vars(module)["_packed"]).dense()
            return dense.t().contiguous() if self.transposed else dense

    def save(self, module: nn.Module, state: dict[str, Tensor], prefix: str) -> None:
        """The stock weight under its stock key."""
        with LOCK:
            if isinstance(module._parameters["weight"], Placeholder):
                state[prefix + "weight"] = self.dense(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Packing:
        return self


def packable(weight: nn.Parameter) -> bool:
    """Whether oneDNN takes this tensor: dense, on the CPU, fp32 or bf16, two-dimensional."""
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and weight.ndim == 2
        and weight.numel() > 0
    )


class Packed(Mixin):
    """``nn.Linear`` on a packed weight.

    ``module.weight`` reads as the stock parameter: it is unpacked when asked for, and packed again
    at the next call once nobody holds it, so that writing into it is never lost.
    Measured in fp32: Zen 5, one thread, K = N = 3072, 1.4x at one row and 2.3 to 2.4x from 8 to
    1,024. Cascade Lake with MKL: 1.3 to 3x from 4 to 64 rows, parity above, 0.9x at one row.
    """

    packing = Packing(transposed=False)
    bridges = (packing,)
    _packed: PackedWeight | None
    _lent: int
    training: bool
    bias: Tensor | None
    _parameters: dict[str, nn.Parameter]

    @classmethod
    def accepts(cls, site: Site, context: Context) -> Refusal | None:
        if refusal := out_of_reach(site, "weight"):
            return refusal
        weight = cast(nn.Parameter, site.module._parameters["weight"])
        return _unfit_weight(weight) or _unfit_hardware(context)

    @classmethod
    def size(cls, module: nn.Module) -> str:
        """``"OUTxIN"``."""
        weight = cast(nn.Parameter, module._parameters["weight"])
        rows, columns = weight.shape[::-1] if cls.packing.transposed else weight.shape
        return f"{rows}x{columns}"

    @classmethod
    def expected(cls, context: Context) -> Refusal | None:
        """A loss for fp32 decoders on Intel's processors, where MKL has a kernel for one row."""
        intel = context.backend.vendor == "GenuineIntel"
        if intel and context.decodes and context.dtype is torch.float32:
            return Refusal(
                "decoding is one row a product, where MKL's fp32 is faster: 0.88x measured "
                "(2048 x 2048, 2 threads, Cascade Lake; `optimus tune` measures this machine)"
            )
        return None

    @classmethod
    def setup(cls, module: nn.Module, surgeon: Surgeon) -> None:
        surgeon.fold(module, cls.packing)

    @property
    def weight(self) -> nn.Parameter:
        """The stock weight."""
        return self.packing.lend(cast(nn.Module, self))

    def forward(self, input: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self._refuse_training()
        if torch.compiler.is_compiling():
            return self._traced(input)
        packed = self._ready(input)
        if packed is None:
            return super().forward(input)  # type: ignore[misc, no-any-return]
        if torch.is_grad_enabled() and _differentiable(input, self.bias):
            return self._product(input, packed)
        return packed.matmul(input, self.bias)

    def _traced(self, input: Tensor) -> Tensor:
        packed: PackedWeight | None = self._packed
        if torch.compiler.is_exporting():
            raise SurgeryError(
                "a packed linear layer cannot be exported: its layout is this machine's own. "
                "Call optimus.reverse(model) first, or export from the stock model."
            )
        if packed is None or self._is_lent_another() or not self._takes(input, packed):
            return super().forward(input)  # type: ignore[misc, no-any-return]
        return self._product(input, packed)

    def _takes(self, input: Tensor, packed: PackedWeight) -> bool:
        """What a compiler need not be told of an input: whether it goes with the weight."""
        return input.dtype is packed.dtype

    def _product(self, input: Tensor, packed: PackedWeight) -> Tensor:
        """The product for compilers and autograd."""
        return held_linear(input, packed.handle, self.bias, packed.out_features)

    def at_hand(self) -> PackedWeight | None:
        """The packed weight, where nobody holds or replaced the dense one; None says no more."""
        return None if self._is_lent_another() else self._packed

    def _ready(self, input: Tensor) -> PackedWeight | None:
        """The packed weight, where it may serve this call; None for the stock path."""
        packed: PackedWeight | None = self._packed
        if packed is None:
            packed = self._repack()
        if packed is None or self._is_lent_another() or not self._serves(input, packed):
            return None
        return packed

    def _serves(self, input: Tensor, packed: PackedWeight) -> bool:
        """Whether the product takes this input, as things are."""
        return (
            type(input) in PLAIN
            and self._takes(input, packed)
            and input.device.type == "cpu"
            and input.shape[-1] == packed.in_features
            and input.numel() > 0
            and not torch.is_autocast_enabled("cpu")
            and not torch.jit.is_tracing()
        )

    def _is_lent_another(self) -> bool:
        """Whether somebody put a weight of his own into the table (``functional_call``)."""
        return type(self._parameters["weight"]) is not Placeholder

    def _repack(self) -> PackedWeight | None:
        weight = self._parameters["weight"]
        # Table, local name and argument: a fourth reference is somebody who may write into it.
        if self._lent >= PATIENCE or sys.getrefcount(weight) > 3:
            return None
        self._lent += 1
        self.packing.fold(cast(nn.Module, self))
        return self._packed

    def _refuse_training(self) -> None:
        if self._parameters["weight"].requires_grad:
            raise SurgeryError(
                "this linear layer is packed for inference, and in training mode its weight would "
                "get no gradient. Call model.eval() to infer, or optimus.reverse(model) to train."
            )

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As ``nn.Module``; a new weight replaces the packed one."""
        super().register_parameter(name, param)  # type: ignore[misc]
        if name == "weight":
            self._packed = None

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.packing.lend(cast(nn.Module, self))
        return super()._apply(*args, **kwargs)  # type: ignore[misc]


class PackedByColumn(Packed):
    """GPT-2's ``Conv1D``, a linear layer whose weight is stored ``[in, out]``."""

    packing = Packing(transposed=True)
    bridges = (packing,)


def out_of_reach(site: Site, key: str) -> Refusal | None:
    """Why nobody may change the layout of this parameter of the site."""
    weight = site.module._parameters.get(key)
    if isinstance(site.owner, nn.MultiheadAttention | nn.TransformerEncoderLayer):
        return Refusal(f"{type(site.owner).__name__} reads the {key} itself")
    if type(weight) is not nn.Parameter:
        kind = "missing" if weight is None else f"a {type(weight).__name__}"
        return Refusal(f"{key} is {kind}")
    if weight.is_meta and "_hf_hook" in vars(site.module):
        return Refusal(f"{key} is offloaded: accelerate brings it in for each call")
    return None


def _differentiable(input: Tensor, bias: Tensor | None) -> bool:
    return input.requires_grad or (bias is not None and bias.requires_grad)


def _unfit_weight(weight: nn.Parameter) -> Refusal | None:
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return Refusal(f"weight is {str(weight.dtype).removeprefix('torch.')}")
    if weight.ndim != 2:
        return Refusal(f"weight has {weight.ndim} dimensions")
    return too_small(weight)


def too_small(weight: nn.Parameter) -> Refusal | None:
    """Whether the call costs more than the layout saves."""
    if weight.numel() < SMALLEST:
        return Refusal(f"too small to pay: fewer than {SMALLEST:,} weights")
    return None


def _unfit_hardware(context: Context) -> Refusal | None:
    needed = "packed-linear-bf16" if context.dtype is torch.bfloat16 else "packed-linear"
    if needed not in context.backend.features:
        return Refusal("this torch has no oneDNN products for the dtype", hardware=True)
    return None
