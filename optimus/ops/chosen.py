"""Attention by the kernel that the caller names: torch's own operators, past torch's own choice.

``scaled_dot_product_attention`` chooses by flags of the whole process, and the context manager that
sets them breaks graphs. The operators behind it take no part in that: each is one node of a graph.
What torch's choice does for each of them first is done here, too.
Source: ``aten/src/ATen/native/transformers/attention.cpp``, ``scaled_dot_product_attention``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

aten = torch.ops.aten
HALF = frozenset({torch.float16, torch.bfloat16})
CPU_FLOATS = frozenset({torch.float64, torch.float32, *HALF})
CUDA_FLOATS = frozenset({torch.float32, *HALF})
# Flash kernels on CUDA want heads of whole words, and efficient ones biases at whole lines.
WORD, LINE = 8, 16


class Call(NamedTuple):
    """What an operator is called with: ``[batch, heads, length, dim]``, and a mask of floats that
    is added, of four dimensions."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    dropout: float

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """What is multiplied."""
        return self.query, self.key, self.value


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operator on one kind of device, and what it takes; ``dtypes`` None is all.

    ``call``: of keys of as many heads as there are, or of fewer where it ``shares``. ``since``:
    the oldest compute capability that has it.
    """

    call: Callable[[Call], Tensor]
    dtypes: frozenset[torch.dtype] | None = None
    masks: bool = True
    drops: bool = True
    learns: bool = False
    narrows: bool = False
    shares: bool = True
    whole: bool = False
    widest: int | None = None
    since: tuple[int, int] | None = None

    def leaves(self) -> str:
        """Which calls it does not take, in words; "" for none."""
        left = (
            ("a mask", not self.masks),
            ("dropout", not self.drops),
            ("a learned bias", self.masks and not self.learns),
            ("values narrower than keys", not self.narrows),
            (f"heads that are no multiple of {WORD} wide", self.whole),
            (f"heads wider than {self.widest}", self.widest is not None),
        )
        return ", ".join(what for what, holds in left if holds)

    def takes(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float
    ) -> bool:
        """Whether it computes this call. By shapes alone: a graph has no branch for it."""
        width = query.shape[-1]
        return (
            (self.masks or mask is None)
            and (self.drops or not dropout)
            and (self.learns or mask is None or not mask.requires_grad)
            and (self.narrows or value.shape[-1] == width)
            and not (self.whole and (width % WORD or value.shape[-1] % WORD))
            and (self.widest is None or width <= self.widest)
            and (self.dtypes is None or query.dtype in self.dtypes)
            and 0 not in (*query.shape, *key.shape)
        )


def attend(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(query keyᵀ scale + mask) value, ``[batch, heads, length, dim]``, by that kernel.

    Keys of fewer heads are shared. A mask is boolean (True is seen) or added; with one, nothing is
    causal besides. ``kernel.takes`` must hold.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if not kernel.shares:
        key, value = (_repeated(one, query.shape[1]) for one in (key, value))
    query, key, value = (_dense(one) for one in (query, key, value))
    return kernel.call(Call(query, key, value, added(mask, query), causal, scale, dropout))


def added(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """The mask as floats of the query's dtype: the operators add even a boolean."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        nothing = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, nothing, -torch.inf)
    mask = mask.to(query.dtype)
    return mask if mask.ndim == 4 else mask.expand(1, 1, *mask.shape[-2:])


def _repeated(states: Tensor, heads: int) -> Tensor:
    groups = states.shape[1]
    return states if groups == heads else states.repeat_interleave(heads // groups, 1)


def _dense(states: Tensor) -> Tensor:
    return states if states.stride(-1) == 1 else states.contiguous()


def _math(call: Call) -> Tensor:
    shares = call.query.shape[1] != call.key.shape[1]
    out: Tensor = aten._scaled_dot_product_attention_math.default(
        *call.operands, call.mask, call.dropout, call.causal, scale=call.scale, enable_gqa=shares
    )[0]
    return out


def _flash_on_cpu(call: Call) -> Tensor:
    out: Tensor = aten._scaled_dot_product_flash_attention_for_cpu.default(
        *call.operands, call.dropout, call.causal, attn_mask=call.mask, scale=call.scale
    )[0]
    return out


def _flash_on_cuda(call: Call) -> Tensor:
    width = call.query.shape[-1]
    padded = (pad(one, (0, -width % WORD)) for one in call.operands)
    out: Tensor = aten._scaled_dot_product_flash_attention.default(
        *padded, call.dropout, call.causal, scale=call.scale
    )[0]
    return out[..., :width]


def _efficient(call: Call) -> Tensor:
    bias = None if call.mask is None else _aligned(call.mask)
    return _by_bias(aten._scaled_dot_product_efficient_attention.default, call, bias)


def _cudnn(call: Call) -> Tensor:
    return _by_bias(aten._scaled_dot_product_cudnn_attention.default, call, call.mask)


def _by_bias(operator: Callable[..., Any], call: Call, bias: Tensor | None) -> Tensor:
    if bias is not None:
        bias = _spread(bias, call.query, call.key)
    learns = _learns(*call.operands, bias)
    out: Tensor = operator(
        *call.operands, bias, learns, call.dropout, call.causal, scale=call.scale
    )[0]
    return out


def _learns(*given: Tensor | None) -> bool:
    """Whether the backward pass will ask for the logarithms of the sums."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)


def _aligned(mask: Tensor) -> Tensor:
    """The same numbers, each row of them beginning a line."""
    length = mask.shape[-1]
    return pad(mask, (0, -length % LINE))[..., :length]


def _spread(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


MATH = Kernel(_math, learns=True, narrows=True)
# By device and name; MATH is made of plain products, and serves every device.
KERNELS = {
    ("cpu", "flash"): Kernel(_flash_on_cpu, CPU_FLOATS, drops=False),
    # Those of CUDA have run on meta and against a double only.
    ("cuda", "flash"): Kernel(_flash_on_cuda, HALF, masks=False, widest=256, since=(8, 0)),
    ("cuda", "efficient"): Kernel(_efficient, CUDA_FLOATS, shares=False, whole=True),
    ("cuda", "cudnn"): Kernel(_cudnn, HALF, shares=False, whole=True, widest=128, since=(8, 0)),
}


def kernel_for(device: str, name: str) -> Kernel | None:
    """The kernel of that name on devices of that type; None where there is none."""
    return MATH if name == "math" else KERNELS.get((device, name))
