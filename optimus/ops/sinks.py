"""Attention with sinks: logits that take part in the softmax and have no value to give.

What a sink takes away is known once the others' log-sum-exp is: ``softmax([s, sink])[:-1] @ v``
is ``(softmax(s) @ v) * sigmoid(lse - sink)``, so that a fused kernel does the work and one factor
a row the rest. The backward kernels only read the output and the log-sum-exp, and are right about
sinks when they are given both with the sink in them.

On CUDA this is written from the documentation of PyTorch's memory-efficient kernel and never ran.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from optimus.ops.kernels import widened

# The memory-efficient kernel reads the bias in 16 bytes at a time, whatever its dtype.
ALIGNMENT = 8


def sink_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None, scale: float
) -> Tensor | None:
    """``[batch, heads, length, dim]`` in and out, or None where no kernel fits.

    ``sinks`` broadcasts to ``[batch, heads, length]``; ``mask`` is added to the logits. Keys and
    values may have fewer heads; values may be narrower, or wider, than keys.
    """
    learning = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, sinks))
    if query.device.type not in ("cpu", "cuda") or (learning and query.is_cuda):
        return None
    width = max(query.shape[-1], value.shape[-1])
    q, k, v = (widened(t, width) for t in (query, key, value))
    if learning:
        out: Tensor = _Learned.apply(q, k, v, sinks, mask, scale)  # type: ignore[no-untyped-call]
    else:
        out, lse = (_on_cuda if query.is_cuda else _on_cpu)(q, k, v, mask, scale)
        out = _shared(out, lse, sinks)
    return out[..., : value.shape[-1]]


def _shared(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    return out * torch.sigmoid(lse - sinks.to(lse.dtype)).unsqueeze(-1).to(out.dtype)


def _on_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp ``[batch, heads, length]``; grouped heads are its own."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=mask, scale=scale
    )
    return out, lse


def _on_cuda(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """As ``_on_cpu``; this kernel wants a key for every head, and a bias of the full shape."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
    if mask is not None:
        shape = (*query.shape[:3], key.shape[2])
        room = -shape[-1] % ALIGNMENT
        mask = pad(mask, (0, room)).to(query.dtype)[..., : shape[-1]].expand(shape)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, compute_log_sumexp=True, scale=scale
    )
    return out, lse[..., : query.shape[2]]


class _Learned(torch.autograd.Function):
    """On a CPU, with gradients for everything but the mask."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        mask: Tensor | None,
        scale: float,
    ) -> Tensor:
        out, lse = _on_cpu(query, key, value, mask, scale)
        out = _shared(out, lse, sinks)
        total = torch.logaddexp(lse, sinks.to(lse.dtype).expand_as(lse))
        ctx.save_for_backward(query, key, value, sinks, mask, out, total)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, mask, out, total = ctx.saved_tensors
        grad = grad.contiguous()
        inner = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad,
            query,
            key,
            value,
            out,
            total,
            dropout_p=0.0,
            is_causal=False,
            attn_mask=mask,
            scale=ctx.scale,
        )
        given = (grad * out).sum(-1, dtype=total.dtype)
        taken = torch.exp(sinks.to(total.dtype) - total)
        return *inner, (-taken * given).sum_to_size(sinks.shape).to(sinks.dtype), None, None
