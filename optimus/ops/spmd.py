"""Shardings of tensors over the devices of XLA, as annotations.

The compiler splits the program by them and puts in what has to be exchanged: an annotation is
never wrong, only more or less useful. All devices form one axis. Source of the calls:
docs/source/perf/spmd_basic.md of pytorch/xla.
"""

from __future__ import annotations

from torch import Tensor, nn

from optimus.core.errors import Refusal

AXIS, DEVICE = "model", "xla"
# Where a module keeps the split of its weight, for whoever stores the weight in another form.
SPLIT = "_optimus_split"


def unfit_devices() -> Refusal | None:
    """Why nothing can be sharded in this process; None where it can."""
    import torch_xla.runtime as xr

    if not xr.is_spmd():
        return Refusal(
            "SPMD is off; call torch_xla.runtime.use_spmd() before anything is moved to XLA",
            hardware=True,
        )
    if xr.global_runtime_device_count() < 2:
        return Refusal("there is one device, and nothing to shard over", hardware=True)
    return None


def devices() -> int:
    """How many a sharding is over."""
    import torch_xla.runtime as xr

    return int(xr.global_runtime_device_count())


def sharding(tensor: Tensor) -> str:
    """The annotation as XLA writes it; "" for none. A run leaves "{replicated}" where none was."""
    import torch_xla

    found = str(torch_xla._XLAC._get_xla_sharding_spec(tensor))
    return "" if found == "{replicated}" else found


def shard(tensor: Tensor, dimension: int | None) -> None:
    """Annotate in place: each device holds a part along ``dimension``, or, for None, all of it."""
    import torch_xla.distributed.spmd as xs

    spec = tuple(AXIS if one == dimension else None for one in range(tensor.ndim))
    xs.mark_sharding(tensor.detach(), xs.get_1d_mesh(AXIS), spec)


def gather(tensor: Tensor) -> None:
    """Take the annotation away; the numbers stay, bit for bit."""
    import torch_xla.distributed.spmd as xs

    xs.clear_sharding(tensor.detach())


class Split:
    """The layout of a linear layer whose weight ``[out, in]`` is split along ``dimension``.

    A bias is split with the outputs. What else holds the weight (a tie) sees it split, too.
    """

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension

    def fold(self, module: nn.Module) -> None:
        """Annotate."""
        for name, tensor in self._held(module):
            if name == "weight":
                shard(tensor, self.dimension)
            elif self.dimension == 0:
                shard(tensor, 0)

    def unfold(self, module: nn.Module) -> None:
        """As if it had never been annotated."""
        for _, tensor in self._held(module):
            gather(tensor)

    @staticmethod
    def _held(module: nn.Module) -> list[tuple[str, Tensor]]:
        # A model that was moved to another device since has lost its shardings already.
        held = module.named_parameters(recurse=False)
        return [(name, one) for name, one in held if one.device.type == DEVICE]
