"""What a model is to become, as data: stages of names, and which paths are to differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, get_args

from optimus.core.errors import PlanError
from optimus.core.originals import KEEPS, Keep

STOCK = "stock"

Attention = Literal["auto", "flash", "efficient", "cudnn", "math"]
ATTENTIONS: tuple[str, ...] = get_args(Attention)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Ordered stages of name patterns. A lone ``"*"`` takes whatever keeps the model's precision.

    ``skip``: globs of paths to leave alone. ``keep``: where originals of lossy changes wait.
    ``overrides``: pairs of a glob of paths and the name pattern that lossy stages use there in
    place of their own, or ``"stock"`` for none; the first glob that fits decides. ``attention``:
    which kernel computes it, in place of whatever else would; for comparing them.

    >>> Recipe.named("int4", overrides=(("model.layers.0.*", "*.int8"),)).overrides[:2]
    (('model.layers.0.*', '*.int8'), ('*lm_head', '*.int8'))
    """

    name: str
    stages: tuple[tuple[str, ...], ...]
    skip: tuple[str, ...] = ()
    keep: Keep = "host"
    overrides: tuple[tuple[str, str], ...] = ()
    attention: Attention = "auto"

    @classmethod
    def named(cls, name: str, *, overrides: tuple[tuple[str, str], ...] = ()) -> Recipe:
        """The recipe of that name; ``overrides`` come before its own."""
        known = RECIPES.get(name)
        if known is None:
            raise PlanError(f"unknown recipe {name!r}; known are {', '.join(RECIPES)}")
        return replace(known, overrides=(*overrides, *known.overrides))

    def label(self) -> str:
        """Its name, and what it was asked for besides."""
        return self.name if self.attention == "auto" else f"{self.name}, attention {self.attention}"

    def in_order(self) -> tuple[tuple[str, ...], ...]:
        """The stages, with that of the kernel that was asked for before the last, which takes what
        is left: the kernel must know to what dtype the model was cast."""
        if self.attention == "auto":
            return self.stages
        return (*self.stages[:-1], (f"any.kernel.{self.attention}",), *self.stages[-1:])

    def lossy_at(self, path: str, pattern: str) -> str:
        """What a lossy stage of ``pattern`` looks for at ``path``."""
        fitting = (name for glob, name in self.overrides if fnmatchcase(path, glob))
        return next(fitting, pattern)


# A router that errs sends a token to another expert: a jump, and not a drift.
ROUTERS = (("*.gate", STOCK), ("*.router", STOCK), ("*.shared_expert_gate", STOCK))
# Of a decoder's layers the head has the most to tell apart, and it is read once a token.
HEADS = ("*lm_head", "*embed_out", "*predictions.decoder")
USUAL = (*((glob, "*.int8") for glob in HEADS), *ROUTERS)
# What 8 bits gain is in products of many rows, and of a prompt the head is asked for one.
HEADLESS = (*((glob, STOCK) for glob in HEADS), *ROUTERS)
# These need not fit anything: they are for whichever model has such a part.
OPTIONAL = frozenset({*USUAL, *HEADLESS})

RECIPES: dict[str, Recipe] = {
    "auto": Recipe("auto", (("*",),)),
    "bf16": Recipe("bf16", (("cpu.bf16",), ("*",))),
    "int8": Recipe("int8", (("*.int8",), ("*",)), overrides=ROUTERS),
    "int8-dynamic": Recipe("int8-dynamic", (("*.int8-dynamic",), ("*",)), overrides=ROUTERS),
    "int4": Recipe("int4", (("*.int4",), ("*",)), overrides=USUAL),
    "fp8": Recipe("fp8", (("*.fp8",), ("*",)), overrides=HEADLESS),
    "static": Recipe("static", (("static.*",), ("*",))),
}


def resolve_recipe(
    recipe: Recipe | str, *, keep: Keep | None = None, attention: Attention = "auto"
) -> Recipe:
    """The recipe of that name, with ``keep`` put in, and ``attention`` where it is not "auto"."""
    if keep is not None and keep not in KEEPS:
        raise PlanError(f"unknown keep {keep!r}; known are {', '.join(KEEPS)}")
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise PlanError(f"unknown recipe {recipe!r}; known are {', '.join(RECIPES)}")
        recipe = RECIPES[recipe]
    if attention != "auto":
        recipe = replace(recipe, attention=attention)
    if recipe.attention not in ATTENTIONS:
        known = ", ".join(ATTENTIONS)
        raise PlanError(f"unknown attention {recipe.attention!r}; known are {known}")
    return recipe if keep is None else replace(recipe, keep=keep)
