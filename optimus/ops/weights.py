"""Linear layers on a weight of 8 or 4 bits in the layouts of torch's own products for GPUs.

Nothing here has run on a GPU: the 4-bit layout is held to a double written from torch's source
(aten/src/ATen/native/cuda/int4mm.cu), the others run on any device. The tensors are in plain sight,
so that a compiler fuses their conversion into the product.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from optimus.core.errors import Refusal
from optimus.ops.quantized import LARGEST
from optimus.ops.rounding import relative, rounded, zero_code

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# The largest number of e4m3, and the least scale: below it a quotient is not a number of fp32.
E4M3, LEAST = torch.finfo(torch.float8_e4m3fn).max, 1e-12
# Tiles of 8 rows by 16 numbers of k, of which so many lie side by side: 16 bytes a load.
TILE_ROWS, TILE_WIDTH, INNER = 8, 16, 8
# Columns of an identity that is multiplied to read a weight back.
COLUMNS = 1024

W = TypeVar("W", "Int8Weight", "Int4Weight", "Fp8Weight")


def fixed(*tensors: Tensor) -> None:
    """Tell compilers that these stay where they are, as parameters do.

    A captured graph would copy any other tensor, a whole weight, into its own place at every call.
    """
    import torch._dynamo

    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor, guard=False)


def product_on(device: torch.device, name: str) -> bool:
    """Whether torch has the operator ``aten::name`` for that kind of device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", device.type.upper())


def unfit(weight: Tensor, dtypes: tuple[torch.dtype, ...]) -> Refusal | None:
    """What no layout takes: other dtypes and shapes, nothing, and numbers without a scale."""
    if weight.ndim != 2:
        return Refusal(f"weight has {weight.ndim} dimensions")
    if weight.dtype not in dtypes:
        known = " or ".join(str(one).removeprefix("torch.") for one in dtypes)
        found = str(weight.dtype).removeprefix("torch.")
        return Refusal(f"weight is {found}, and the product is of {known}")
    if weight.numel() == 0:
        return Refusal("weight is empty")
    if weight.is_meta:
        return None
    least, most = torch.aminmax(weight.detach())
    if least >= -LARGEST and most <= LARGEST:
        return None
    return Refusal("weight holds NaN, infinity or numbers beyond 1e38")


@dataclass(eq=False)
class Int8Weight:
    """``codes [out, in]`` int8, ``scale [out]`` in ``dtype``; ``y = (x @ codesᵀ) * scale + bias``.

    By itself the product makes the weight wide first; compiled, at one row, it reads the codes and
    nothing else (gpt-fast's way).
    """

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype

    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOATS

    @classmethod
    def of(cls, weight: Tensor, worth: Tensor | None) -> Self:
        """From a dense ``[out, in]``."""
        made = rounded(weight, 8, weight.shape[1], symmetric=True)
        codes = (made.codes.to(torch.int16) - zero_code(8)).to(torch.int8)
        return cls(codes, made.scale.squeeze(1).to(weight.dtype), weight.dtype)

    @staticmethod
    def unfit(weight: Tensor) -> Refusal | None:
        """Why this weight has no such layout; None where it has."""
        return unfit(weight, FLOATS)

    @property
    def in_features(self) -> int:
        """Numbers of a row."""
        return self.codes.shape[1]

    def dense(self) -> Tensor:
        """The rounded weight ``[out, in]``, newly allocated."""
        return self.codes.to(self.dtype) * self.scale[:, None]

    def matmul(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """``input [..., in]`` to ``[..., out]``."""
        out = linear(input, self.codes.to(input.dtype)) * self.scale
        return out if bias is None else out + bias


@dataclass(eq=False)
class Int4Weight:
    """``codes [out / 8, in / 128, 32, 4]`` int32, ``scales [in / group, out, 2]`` bf16.

    A number is ``(code - 8) * scale + zero``, in pairs of those two; ours are symmetric,
    with the codes of the CPU's own 4 bits. bf16 alone.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype = torch.bfloat16

    group: ClassVar[int] = 32
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)

    @classmethod
    def of(cls, weight: Tensor, worth: Tensor | None) -> Self:
        """From a dense ``[out, in]``; ``worth [in]``: how much the error of a feature counts."""
        worth = None if worth is None else relative(worth)
        made = rounded(weight, 4, cls.group, symmetric=True, worth=worth)
        pairs = (made.codes[:, ::2] << 4) | made.codes[:, 1::2]
        codes = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), INNER)
        scale = made.scale.t()
        return cls(codes, torch.stack((scale, torch.zeros_like(scale)), -1).contiguous())

    @classmethod
    def unfit(cls, weight: Tensor) -> Refusal | None:
        """Why this weight has no such layout; None where it has."""
        if refusal := unfit(weight, cls.dtypes):
            return refusal
        if not weight.is_meta and not product_on(weight.device, "_weight_int4pack_mm"):
            return Refusal(f"torch has no product of 4-bit tiles on {weight.device.type}")
        rows, width = weight.shape
        if rows % TILE_ROWS:
            return Refusal(f"{rows} output features are no multiple of {TILE_ROWS}")
        if width % (TILE_WIDTH * INNER):
            return Refusal(f"{width} input features are no multiple of {TILE_WIDTH * INNER}")
        return None

    @property
    def in_features(self) -> int:
        """Numbers of a row."""
        return self.scales.shape[0] * self.group

    def dense(self) -> Tensor:
        """The rounded weight ``[out, in]``, newly allocated; an identity's product reads it."""
        width = self.in_features
        rows = []
        for start in range(0, width, COLUMNS):
            count = min(COLUMNS, width - start)
            one = torch.zeros(count, width, dtype=self.dtype, device=self.codes.device)
            one.diagonal(start).fill_(1)
            rows.append(self.matmul(one, None))
        return torch.cat(rows).t().contiguous()

    def matmul(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """``input [..., in]`` to ``[..., out]``."""
        rows = input.reshape(-1, input.shape[-1]).contiguous()
        out = torch.ops.aten._weight_int4pack_mm(rows, self.codes, self.group, self.scales)
        out = out.view(*input.shape[:-1], self.scales.shape[1])
        return out if bias is None else out + bias


class Int4WeightG64(Int4Weight):
    """64 numbers share a scale."""

    group = 64


class Int4WeightG128(Int4Weight):
    """128 numbers share a scale."""

    group = 128


@dataclass(eq=False)
class Fp8Weight:
    """``codes [out, in]`` e4m3, ``scale [1, out]`` fp32; rows of the input are rounded likewise.

    bf16 in and out, which is what torch's product of rows with scales gives.
    """

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype = torch.bfloat16

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)

    @classmethod
    def of(cls, weight: Tensor, worth: Tensor | None) -> Self:
        """From a dense ``[out, in]``."""
        codes, scale = _to_e4m3(weight)
        return cls(codes, scale.t().contiguous())

    @classmethod
    def unfit(cls, weight: Tensor) -> Refusal | None:
        """Why this weight has no such layout; None where it has."""
        if refusal := unfit(weight, cls.dtypes):
            return refusal
        if not weight.is_meta and not product_on(weight.device, "_scaled_mm"):
            return Refusal(f"torch has no product of fp8 on {weight.device.type}")
        if weight.shape[0] % 16 or weight.shape[1] % 16:
            found = f"{weight.shape[1]} to {weight.shape[0]} features"
            return Refusal(f"{found}: fp8 products take multiples of 16")
        return None

    @property
    def in_features(self) -> int:
        """Numbers of a row."""
        return self.codes.shape[1]

    def dense(self) -> Tensor:
        """The rounded weight ``[out, in]``, newly allocated."""
        return (self.codes.float() * self.scale.t()).to(self.dtype)

    def matmul(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """``input [..., in]`` to ``[..., out]``."""
        codes, scale = _to_e4m3(input.reshape(-1, input.shape[-1]))
        out = torch._scaled_mm(
            codes,
            self.codes.t(),
            scale_a=scale,
            scale_b=self.scale,
            bias=bias,
            out_dtype=self.dtype,
            use_fast_accum=input.is_cuda,
        )
        return out.view(*input.shape[:-1], self.codes.shape[0])


def _to_e4m3(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``[n, k]`` to codes and ``[n, 1]`` fp32 scales. A row that holds no number comes out as none.

    Infinity would be rounded to the largest number; its scale makes NaN of it.
    """
    wide = rows.float()
    scale = (wide.abs().amax(1, keepdim=True) / E4M3).clamp_min(LEAST)
    return (wide / scale).clamp(-E4M3, E4M3).to(torch.float8_e4m3fn), scale


def moved(weight: W, device: torch.device) -> W:
    """The same codes on ``device``."""
    if weight.codes.device == device:
        return weight
    tensors = {field.name: getattr(weight, field.name) for field in fields(weight)}
    tensors = {name: one.to(device) for name, one in tensors.items() if isinstance(one, Tensor)}
    made = replace(weight, **tensors)
    fixed(*tensors.values())
    return made


def made_of(layout: type[W], weight: Tensor, worth: Tensor | None) -> W:
    """``weight [out, in]`` in that layout; ``worth [in]`` as in ``rounding``."""
    # Grad mode off, inference mode off: the codes must be usable in either.
    with torch.inference_mode(mode=False), torch.no_grad():
        made = layout.of(weight.detach(), worth)
    fixed(*(one for one in vars(made).values() if isinstance(one, Tensor)))
    return made
