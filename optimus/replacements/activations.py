"""The approximations of GELU, wherever a model keeps them as modules.

GELU itself is left to torch: 0.43x to 0.88x from 64 rows on (3072 wide, Zen 4, two threads).
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from optimus.core.backend import Context, Mode
from optimus.core.errors import Refusal
from optimus.core.paths import Site
from optimus.core.replacement import Architecture, Mixin, Replacement
from optimus.ops import native
from optimus.ops.activation import GELU_QUICK, GELU_TANH, activate
from optimus.replacements._steps import plain

HOST = "transformers.activations:{}"
TORCH = "torch.nn.modules.activation:GELU"


class Activated(Mixin):
    """One pass in place of torch's, or of the eight operators that some models write out."""

    kind: ClassVar[int]
    approximate: ClassVar[str]

    @classmethod
    def accepts(cls, site: Site, context: Context) -> Refusal | None:
        if not native.steps():
            return Refusal("the compiled kernels need AVX-512", hardware=True)
        asked = _approximate(site.module)
        if asked != cls.approximate:
            return Refusal(f"its approximation is {asked!r}, not {cls.approximate!r}")
        return None

    def forward(self, input: Tensor) -> Tensor:
        if not plain(input):
            return super().forward(input)  # type: ignore[misc, no-any-return]
        return activate(input, self.kind)


class Tanh(Activated):
    """The cubic in a tanh: 4.8x to 15x written out (GPT-2), 1.3x to 3.6x by torch; Zen 4."""

    kind, approximate = GELU_TANH, "tanh"


class Quick(Activated):
    """x sigmoid(1.702 x): 1.6x to 2.7x; Zen 4, fp32 and bf16, 1 to 4096 rows of 3072."""

    kind, approximate = GELU_QUICK, "quick"


# What modules that write their formula out compute; others keep a function, or say it.
WRITTEN = {
    "NewGELUActivation": "tanh",
    "FastGELUActivation": "tanh",
    "AccurateGELUActivation": "tanh",
    "QuickGELUActivation": "quick",
}


def _approximate(module: nn.Module) -> str:
    """Which GELU it is, by torch's names; ``other`` where it is none that is known."""
    for cls in type(module).__mro__:
        if cls.__name__ in WRITTEN:
            return WRITTEN[cls.__name__]
    act: Any = vars(module).get("act")
    if act is None:
        return str(getattr(module, "approximate", "other"))
    if isinstance(act, functools.partial):
        known = act.func is F.gelu and not act.args and act.keywords.keys() == {"approximate"}
        return str(act.keywords["approximate"]) if known else "other"
    return "other"


def row(what: str, mixin: type[Mixin], *classes: str) -> Replacement:
    """One kind, of torch's module and of the host's."""
    return Replacement(
        name=f"any.activation.{what}",
        targets=(*(HOST.format(name) for name in classes), TORCH),
        mixin=mixin,
        modes=frozenset({Mode.INFERENCE}),
        backends=frozenset({"x86"}),
    )


ARCHITECTURE = Architecture(
    model_type="any",
    replacements=(
        row(
            "gelu-tanh",
            Tanh,
            *("GELUTanh", "PytorchGELUTanh", "NewGELUActivation", "FastGELUActivation"),
            "AccurateGELUActivation",
        ),
        row("gelu-quick", Quick, "QuickGELUActivation"),
    ),
)
