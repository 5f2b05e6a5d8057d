"""What can be swapped, and by what: mixins, the rules that place them, and whole-model passes."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar, Protocol, cast

from torch import Tensor, nn

from optimus.core.backend import BACKENDS, Context, Mode
from optimus.core.canonical import Canonical
from optimus.core.costs import Measured, measured, measured_rows
from optimus.core.errors import Refusal
from optimus.core.originals import Keeper
from optimus.core.paths import Site
from optimus.core.surgery import Surgeon
from optimus.ops.rounding import importance

EVERYWHERE = frozenset(BACKENDS)
ANY_MODE = frozenset(Mode)
# Where a module keeps the number of keys from which on its claim holds, if it is a measured one.
SHORTEST = "_optimus_shortest"

# One class a pair, so that models of one kind share it and compilers guard on one type.
_made: dict[tuple[type, type], type[nn.Module]] = {}


class Fidelity(enum.Enum):
    """How much of the answer a swap may change."""

    EXACT = "exact"
    CLOSE = "close"
    LOSSY = "lossy"


class Mixin(Canonical):
    """A new forward for an old module. It has no ``__init__``: the object already exists.

    ``rounds`` names the parameters that lose digits: their originals are kept, and the setup finds
    them in ``surgeon.kept``, unless they are tied and stay where they are. ``calibrates``: its
    rounding is better for knowing what comes in (``importance``, and then ``surgeon.worth``).
    ``successors`` names the classes of which its model may put a new object in its place by itself.
    """

    rounds: ClassVar[tuple[str, ...]] = ()
    calibrates: ClassVar[bool] = False
    successors: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def accepts(cls, site: Site, context: Context) -> Refusal | None:
        """None to take the site, or the reason to leave it. Reads, never changes."""
        return None

    @classmethod
    def size(cls, module: nn.Module) -> str:
        """What of the site decides which rows pay, as ``optimus tune`` writes it; "" for nothing.

        A mixin that names sizes is claimed unless its size was measured to lose.
        """
        return ""

    @classmethod
    def expected(cls, context: Context) -> Refusal | None:
        """Why it would not pay, as long as nobody has measured the site's size on this machine."""
        return None

    @classmethod
    def remark(cls) -> str:
        """What whoever reads the plan should know of a claim, in a few words; "" for nothing."""
        return ""

    @classmethod
    def allows_tie(cls, other: nn.Module) -> bool:
        """Whether the site may share a parameter with ``other``: a new layout would untie them."""
        return not cls.bridges

    @classmethod
    def importance(cls, module: nn.Module, input: Tensor, *others: Any) -> dict[str, Tensor]:
        """Of a call of the stock module, by the keys of ``rounds``: what errors of a feature count.

        ``[in]``, or as many of them as the parameter has matrices.
        """
        return {cls.rounds[0]: importance(input)}

    def limited(self) -> list[nn.Module]:
        """Who of the site looks at ``SHORTEST`` when it is called."""
        return [cast(nn.Module, self)]

    @classmethod
    def setup(cls, module: nn.Module, surgeon: Surgeon) -> None:
        """Prepare what ``forward`` needs. Every change goes through the surgeon."""


def reclassed(mixin: type[Canonical], original: type[nn.Module]) -> type[nn.Module]:
    """``mixin`` over ``original``, under the original's name.

    The name stays because the host reads it: ``save_pretrained`` writes it into ``config.json``,
    transformers keys its output recorders by ``str(class)`` and reads the module's source by it,
    and wrap policies match it. ``repr`` shows the mixin. The forward keeps the original's
    signature, which Trainer, pipelines and sentence-transformers inspect.
    """
    if (mixin, original) not in _made:
        _made[mixin, original] = _derive(mixin, original)
    return _made[mixin, original]


def _derive(mixin: type[Canonical], original: type[nn.Module]) -> type[nn.Module]:
    body: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_get_name": lambda self: mixin.__name__ + super(mixin, self)._get_name(),
    }
    forward = getattr(mixin, "forward", None)
    if forward is not None:
        body["forward"] = _with_signature(forward, original.forward)
    metaclass: Any = type(original)
    return cast(type[nn.Module], metaclass(original.__name__, (mixin, original), body))


def _with_signature(forward: FunctionType, original: Callable[..., Any]) -> FunctionType:
    twin = FunctionType(
        forward.__code__,
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    twin.__kwdefaults__ = forward.__kwdefaults__
    functools.update_wrapper(twin, original)
    return twin


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A named rule: which sites a mixin may take, and how faithful it is.

    ``targets`` are ``"module:Class"`` strings, matched along the MRO, so that nothing has to be
    imported to match. ``gated``: claimed only where the table of ``costs`` says that it pays.
    ``because``: why its sites are always left alone, for a rule that is there to say so.
    ``together``: all of its sites or none, and some of every target: what one of them makes in a
    new form, another reads.
    """

    name: str
    targets: tuple[str, ...]
    mixin: type[Mixin]
    fidelity: Fidelity = Fidelity.CLOSE
    modes: frozenset[Mode] = ANY_MODE
    backends: frozenset[str] = EVERYWHERE
    gated: bool = False
    because: str = ""
    together: bool = False

    def claims(self, site: Site) -> bool:
        """Whether the site's class is, or derives from, a target."""
        return self._target(type(site.module)) is not None

    def refuses(self, site: Site, context: Context) -> Refusal | None:
        """Why a claimed site must be left alone, or None; speed is ``too_slow``'s to judge."""
        cls = type(site.module)
        target = self._target(cls)
        if self.because:
            return Refusal(self.because)
        if target is not None and cls.forward is not target.forward:
            return Refusal(f"{cls.__qualname__} overrides the forward of {target.__qualname__}")
        if _is_patched(site.module):
            return Refusal("forward is patched on this instance")
        if context.backend.name not in self.backends:
            return Refusal(f"not built for {context.backend.name}", hardware=True)
        if context.mode not in self.modes:
            return Refusal(f"not for {context.mode.value}")
        return self.mixin.accepts(site, context)

    def too_slow(self, site: Site, context: Context) -> Refusal | None:
        """Why a site that could be taken is not worth it, or None."""
        found = self._found(site, context)
        return found if isinstance(found, Refusal) else None

    def measured(self, site: Site, context: Context) -> Measured | None:
        """What the claim of a site rests on, where it rests on something."""
        found = self._found(site, context)
        return found if isinstance(found, Measured) else None

    def lacks(self, found: Iterable[Site]) -> str:
        """The class of a target that none of the sites is of; "" where there is one of each."""
        known = {c for site in found for c in type(site.module).__mro__}
        names = {f"{c.__module__}:{c.__qualname__}" for c in known}
        missing = (one.partition(":")[2] for one in self.targets if one not in names)
        return next(missing, "")

    def _found(self, site: Site, context: Context) -> Measured | Refusal | None:
        # Fewer bits are asked for by name, and for the memory, too.
        if self.fidelity is Fidelity.LOSSY:
            return None
        if self.gated:
            return measured(self.name, context)
        size = self.mixin.size(site.module)
        known = measured_rows(f"{self.name} {size}", context) if size else None
        return known or self.mixin.expected(context)

    def _target(self, cls: type[nn.Module]) -> type[nn.Module] | None:
        names = (f"{c.__module__}:{c.__qualname__}" for c in cls.__mro__)
        found = [c for c, name in zip(cls.__mro__, names, strict=True) if name in self.targets]
        return found[-1] if found else None


def _is_patched(module: nn.Module) -> bool:
    """Somebody's ``forward`` on the instance that is neither accelerate's nor its leftover."""
    instance = vars(module)
    forward = instance.get("_old_forward" if "_old_forward" in instance else "forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Replacements that belong together, with a model that the laws can build in a second.

    ``tiny`` returns a transformers config, or a plain module and a sample for it; None leaves it
    to the tests to make one. ``heads`` names the transformers auto classes that the laws build
    from the config.
    """

    model_type: str
    replacements: tuple[Replacement, ...]
    tiny: Callable[[], Any] | None = None
    heads: tuple[str, ...] = ("AutoModel",)


class Pass(Protocol):
    """A change to the whole model that a backend wants."""

    name: str
    fidelity: Fidelity
    backends: frozenset[str]

    def concerns(self, model: nn.Module) -> bool:
        """Whether the model is of its kind; of others the plan says nothing."""

    def refuses(self, model: nn.Module, context: Context) -> Refusal | None:
        """Why not on this model, or None."""

    def settles(self, context: Context) -> Context:
        """What later stages will find: the context after this pass."""

    def run(self, model: nn.Module, surgeon: Surgeon, keeper: Keeper) -> None:
        """Change the model through the surgeon; what is lost goes to the keeper first."""
