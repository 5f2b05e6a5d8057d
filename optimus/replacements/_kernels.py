"""The kernel of attention that was asked for by name, through transformers' own switch.

Every kernel is a function in the host's registry, and a model is switched to it by its config: data
that ``reverse`` takes back, that no other model sees, and that a compiler reads as a constant.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from optimus.core.backend import Context
from optimus.core.errors import Refusal
from optimus.core.paths import Site
from optimus.core.replacement import Mixin
from optimus.core.surgery import Surgeon
from optimus.ops.chosen import Kernel, attend, kernel_for
from optimus.replacements._attention import is_flagged, names_in_forward, selected, switch
from optimus.replacements._grouped import (
    SINKS,
    grouped_mask,
    is_latent,
    source_says,
    unfit_config,
)

# Numbers, for a name that has "flash" in it would be treated as the host's own.
NAMES = {
    name: f"optimus_kernel_{number}"
    for number, name in enumerate(("flash", "efficient", "cudnn", "math"))
}
# What the host's function does something about that no kernel does.
OTHERS = ("softcap", "cache", "output_attentions")
KNOWS = re.compile(r"_attn_implementation\s*(?:==|!=|in\b|not in\b).*sdpa")


@functools.cache
def by(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function of that kernel for the host's registry, in place of sdpa.

    ``[batch, heads, length, dim]`` in, ``[batch, length, heads, dim]`` out. A call that the kernel
    does not take is the host's, mask and all. One function a kernel, however often it is
    registered: compilers guard on it.
    """

    def kernel_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        indices, mask = kwargs.pop("indices", None), attention_mask
        if mask is not None:
            mask = selected(mask, query, key, indices)
        kernel = kernel_for(query.device.type, name)
        if kernel is not None and not any(kwargs.get(other) for other in OTHERS):
            out = _by_kernel(kernel, module, query, key, value, mask, **kwargs)
            if out is not None:
                return out.transpose(1, 2).contiguous(), None
        out, _ = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        return out, None

    return kernel_attention


def _by_kernel(
    kernel: Kernel,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """The call as the host reads it; None where the kernel does not take it."""
    length = query.shape[2]
    causal = length > 1 and mask is None and is_flagged(module, is_causal)
    if causal and key.shape[2] > length:
        # The rest of a static cache that is still empty.
        key, value = key[:, :, :length], value[:, :, :length]
    if position_bias is not None:
        from transformers.integrations.sdpa_attention import create_position_bias_mask

        position_bias = position_bias[..., : key.shape[2]]
        mask = create_position_bias_mask(position_bias, mask, causal, query, key)
        causal = False
    if not kernel.takes(query, key, value, mask, dropout):
        return None
    return attend(kernel, query, key, value, mask, causal=causal, scale=scaling, dropout=dropout)


def register() -> None:
    """Announce the functions to transformers. Harmless to repeat; the host cannot unregister."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for kernel, name in NAMES.items():
        AttentionInterface.register(name, by(kernel))
        AttentionMaskInterface.register(name, grouped_mask)


class ChosenKernel(Mixin):
    """A model whose attention is computed by one kernel. Only the config is changed."""

    kernel: ClassVar[str]

    @classmethod
    def accepts(cls, site: Site, context: Context) -> Refusal | None:
        config = getattr(site.module, "config", None)
        if config is None or config is getattr(site.owner, "config", None):
            return Refusal("its config is that of the model around it")
        kernel = kernel_for(context.backend.device, cls.kernel)
        assert kernel is not None, "the row names the backends"
        if kernel.dtypes is not None and context.dtype not in kernel.dtypes:
            known = sorted(_short(dtype) for dtype in kernel.dtypes)
            return Refusal(
                f"the {cls.kernel} kernel takes {', '.join(known)}, and the model is "
                f"{_short(context.dtype)}"
            )
        return (
            _unfit_device(kernel) or unfit_config(config) or _unfit_attention(site.module, kernel)
        )

    @classmethod
    def remark(cls) -> str:
        """Which calls are left to the host, by device."""
        known = {device: kernel_for(device, cls.kernel) for device in ("cpu", "cuda")}
        left = {d: kernel.leaves() for d, kernel in known.items() if kernel is not None}
        return "; ".join(f"on {d}, torch chooses for {calls}" for d, calls in left.items() if calls)

    @classmethod
    def setup(cls, module: nn.Module, surgeon: Surgeon) -> None:
        register()
        switch(module, surgeon, NAMES[cls.kernel])


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _unfit_device(kernel: Kernel) -> Refusal | None:
    if kernel.since is None or not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_capability()
    if found >= kernel.since:
        return None
    needs, has = (".".join(map(str, one)) for one in (kernel.since, found))
    return Refusal(f"it needs compute capability {needs}, and this GPU has {has}", hardware=True)


def _unfit_attention(module: nn.Module, kernel: Kernel) -> Refusal | None:
    parts = list(module.modules())
    if not any("get_interface" in names_in_forward(type(part)) for part in parts):
        return Refusal("its attention does not ask the host which function to use")
    if any(getattr(part, name, None) is not None for part in parts for name in SINKS):
        return Refusal("its attention has sinks, which no kernel of torch takes")
    if source_says(type(module).__module__, KNOWS):
        return Refusal("its modeling file asks for sdpa by name, and does otherwise without")
    if not kernel.narrows and any(is_latent(part) for part in parts):
        return Refusal("its values are narrower than its keys, which the kernel does not take")
    return None


def choosing(name: str) -> type[ChosenKernel]:
    """The mixin of that kernel."""
    body = {"__doc__": ChosenKernel.__doc__, "__module__": __name__, "kernel": name}
    return type(f"{name.capitalize()}Attention", (ChosenKernel,), body)
