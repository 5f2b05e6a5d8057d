"""Who looks at what a module computes besides the model itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_familiar(hook: Any) -> bool:
    """transformers' output recorders and optimus's own watchers know what optimus does."""
    owner = (getattr(hook, "__module__", None) or "").partition(".")[0]
    return owner in ("transformers", "optimus")


def is_watched(module: nn.Module) -> bool:
    """Whether a hook of somebody else sees what goes into this module or comes out of it."""
    instance = module.__dict__
    for name in HOOKS:
        for hook in instance[name].values() if instance[name] else ():
            if not is_familiar(hook):
                return True
    return False


def is_touched(module: nn.Module) -> bool:
    """Whether a call of it would do more than its class does: for a hook, or a forward of its own
    (accelerate's)."""
    return "forward" in module.__dict__ or is_watched(module)


def records_weights(module: nn.Module) -> bool:
    """Whether transformers is collecting attention weights in this call.

    Not every model hands ``output_attentions`` down to its attention, so its recorder is asked.
    While torch.compile traces, the recorder's variable cannot be read: then a recorder on the
    module counts, if its call has begun or not.
    """
    from transformers.utils.output_capturing import _active_collector

    if torch.compiler.is_compiling():
        return bool(module._forward_hooks) or getattr(_active_collector, "compiling", False)
    return any("attentions" in key for key in _active_collector.get() or {})
