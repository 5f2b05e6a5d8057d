"""Doing it and undoing it: one transaction a plan, one journal a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor, nn

from optimus.core.backend import Backend, Mode, resolve
from optimus.core.canonical import Canonical
from optimus.core.errors import PlanError, SurgeryError, VerificationError
from optimus.core.memory import release
from optimus.core.originals import KEEPERS, Keep, Original, demand
from optimus.core.paths import is_sharded, ties, unwrap
from optimus.core.planner import JOURNAL, Claim, Plan, describe, plan
from optimus.core.probe import probe
from optimus.core.recipes import Attention, Recipe, resolve_recipe
from optimus.core.registry import Registry
from optimus.core.replacement import SHORTEST, Mixin, Pass, Replacement, reclassed
from optimus.core.surgery import Edit, Slot, Surgeon, carries, undo
from optimus.core.verify import Reference, Verdict, reference, verify, worth


@dataclass(slots=True)
class Journal:
    """What was done to a model. Lives in the model's ``__dict__`` and is copied with it."""

    plan: Plan
    edits: list[Edit]
    verification: str
    rounded: Mapping[str, Original] = field(default_factory=dict)

    def originals(self) -> Iterator[Original]:
        """Whatever waits elsewhere, in passes' edits or behind rounded parameters."""
        yield from (edit.before for edit in self.edits if isinstance(edit.before, Original))
        yield from self.rounded.values()


def is_transformed(model: nn.Module) -> bool:
    """Whether optimus has changed this model and not yet given it back."""
    return JOURNAL in vars(unwrap(model))


def transform(
    model: nn.Module,
    recipe: Recipe | str = "auto",
    *,
    backend: str | Backend | None = None,
    mode: Mode | str = "inference",
    check: bool = True,
    sample: Mapping[str, Tensor] | None = None,
    keep: Keep = "host",
    attention: Attention = "auto",
    registry: Registry | None = None,
) -> nn.Module:
    """Make the model faster on the hardware it sits on, and prove that it answers the same.

    The same object comes back. ``check`` runs ``sample``, or a ragged probe batch, through the
    stock and the transformed model. Raises ``VerificationError`` after putting the model back,
    ``PlanError`` if it is already transformed by another plan. Rounding to 4 bits weighs its error
    by what the layers see in ``sample``: give it text of the kind that the model will meet.
    ``attention`` names the kernel that is to compute it, for comparing kernels.

    >>> import torch, optimus
    >>> model = torch.nn.Linear(512, 512).eval()
    >>> optimus.is_transformed(optimus.transform(model, sample={"input": torch.ones(2, 512)}))
    True
    """
    root = unwrap(model)
    wanted = keep if isinstance(recipe, str) or keep != "host" else None
    if is_transformed(root):
        _same_again(root, recipe, backend, mode, wanted, attention)
        return model
    options: dict[str, Any] = {"keep": wanted, "attention": attention, "registry": registry}
    made = plan(root, recipe, backend=backend, mode=mode, **options)
    _demand_weights(root)
    check = check and bool(made.claims or made.passes)
    before = _reference(root, made, sample) if check else "not verified: check=False"
    if check and isinstance(before, str):
        warnings.warn(f"{before}. Give a sample to have the answers compared.", stacklevel=2)
    try:
        _apply(root, made, registry, sample)
        journal: Journal = vars(root)[JOURNAL]
        journal.verification = before if isinstance(before, str) else _settle(root, before)
        _limit(root, journal)
    except BaseException:
        if is_transformed(root):
            reverse(root)
        raise
    _commit(journal)
    return model


def apply(
    model: nn.Module,
    made: Plan,
    *,
    sample: Mapping[str, Tensor] | None = None,
    registry: Registry | None = None,
) -> nn.Module:
    """Carry out a plan, without checking answers. All of it or nothing.

    ``sample`` weighs a rounding to 4 bits as it does in ``transform``; the model runs on it once.
    Raises ``PlanError`` where the plan was made for another model, ``SurgeryError`` where a site
    cannot be cut; the model is then as it was, also after an interrupt.
    """
    root = unwrap(model)
    if is_transformed(root):
        if vars(root)[JOURNAL].plan == made:
            return model
        raise PlanError(f"the model is already transformed ({describe(root)}). Reverse it first.")
    _apply(root, made, registry, sample)
    _limit(root, vars(root)[JOURNAL])
    _commit(vars(root)[JOURNAL])
    return model


def take_in(
    model: nn.Module, made: Plan, codes: Mapping[str, object], kept: Mapping[str, Original]
) -> nn.Module:
    """Carry out a plan on weights that are rounded already, and whose originals are ``kept``.

    ``codes`` are by the names of the parameters, whose own values mean nothing. Raises as
    ``apply``.
    """
    _apply(model, made, None, None, Given(codes, kept))
    journal: Journal = vars(model)[JOURNAL]
    journal.verification = "not verified: loaded as it was rounded, and the stock is not here"
    _limit(model, journal)
    return model


@dataclass(frozen=True, slots=True)
class Given:
    """Rounded weights and their originals, where a checkpoint brings both."""

    codes: Mapping[str, object] = field(default_factory=dict)
    kept: Mapping[str, Original] = field(default_factory=dict)


def _apply(
    root: nn.Module,
    made: Plan,
    registry: Registry | None,
    sample: Mapping[str, Tensor] | None,
    given: Given | None = None,
) -> None:
    _demand_weights(root)
    _demand_fit(root, made)
    known = registry or Registry.installed()
    surgeon = Surgeon(root)
    journal = Journal(made, surgeon.edits, "not verified: apply() compares no answers")
    try:
        with surgeon:
            surgeon.worth = _calibrate(root, made, known, sample)
            journal.rounded = _operate(root, made, known, surgeon, given)
            vars(root)[JOURNAL] = journal
    except BaseException:
        # Again, for an interrupt that came when the surgeon was already content.
        undo(root, surgeon.edits)
        vars(root).pop(JOURNAL, None)
        raise


def _commit(journal: Journal) -> None:
    """The point of no return for ``keep="none"``: the originals are let go."""
    if journal.plan.recipe.keep == "none":
        for original in journal.originals():
            original.forget()
        release()


class Keeping(Canonical):
    """The root of a model whose layers were rounded: a checkpoint is one of the originals."""

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Write what the stock model would; ``IrreversibleError`` where nothing was kept."""
        demand(vars(self)[JOURNAL].originals())
        return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]


def reverse(model: nn.Module) -> nn.Module:
    """Give the original back, bit for bit; the same object.

    Raises ``PlanError`` on a stock model, ``SurgeryError`` if the tree was changed since, and
    ``IrreversibleError`` if originals are gone; the model then stays transformed.
    """
    root = unwrap(model)
    if not is_transformed(root):
        raise PlanError("the model is not transformed: there is nothing to reverse.")
    journal: Journal = vars(root)[JOURNAL]
    _demand_own_classes(root, journal.edits)
    _demand_whole(root, journal)
    _fetch(journal)
    undo(root, journal.edits)
    del vars(root)[JOURNAL]
    return model


@contextmanager
def transformed(
    model: nn.Module, recipe: Recipe | str = "auto", **options: Any
) -> Iterator[nn.Module]:
    """Transformed inside the block, the original after it."""
    transform(model, recipe, **options)
    try:
        yield model
    finally:
        reverse(model)


def _operate(
    root: nn.Module, made: Plan, known: Registry, surgeon: Surgeon, given: Given | None
) -> Mapping[str, Original]:
    """Passes first: what a pass casts is what the claims then pack. Returns what was rounded."""
    keeper = KEEPERS[made.recipe.keep]
    for name in made.passes:
        cast(Pass, known[name]).run(root, surgeon, keeper)
    rounded = dict(_rounded(root, made, known))
    if given is not None:
        kept, surgeon.codes = dict(given.kept), given.codes
    else:
        kept = keeper(root, rounded) if rounded else {}
    surgeon.kept = dict(kept)
    # What is not kept in memory must be free as soon as it is rounded.
    rounded.clear()
    for claim in made.claims:
        mixin = _mixin(known, claim)
        module = root.get_submodule(claim.path)
        mixin.setup(module, surgeon)
        surgeon.reclass(module, reclassed(mixin, type(module)))
    if kept:
        surgeon.reclass(root, reclassed(Keeping, type(root)))
    return kept


def _mixin(known: Registry, claim: Claim) -> type[Mixin]:
    return cast(Replacement, known[claim.replacement]).mixin


def _rounded(root: nn.Module, made: Plan, known: Registry) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that claims round; a tied one stays as it is for its other owner."""
    tied = frozenset[str]().union(*ties(root))
    for claim in made.claims:
        for key in _mixin(known, claim).rounds:
            name = f"{claim.path}.{key}".lstrip(".")
            if name not in tied:
                yield name, root.get_parameter(name)


def _calibrate(
    root: nn.Module, made: Plan, known: Registry, sample: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    mixins = {claim.path: _mixin(known, claim) for claim in made.claims}
    mixins = {path: mixin for path, mixin in mixins.items() if mixin.calibrates}
    return worth(root, sample, mixins) if sample is not None and mixins else {}


def _limit(root: nn.Module, journal: Journal) -> None:
    """From here on, swaps that pay from some length up only serve such calls.

    Not before the check: its probe is short, and has to see the swap.
    """
    surgeon = Surgeon(root)
    surgeon.edits = journal.edits
    for claim in journal.plan.claims:
        site = root.get_submodule(claim.path)
        for part in cast(Any, site).limited() if claim.shortest is not None else ():
            surgeon.set_attribute(part, SHORTEST, claim.shortest)


def _fetch(journal: Journal) -> None:
    """Have every original at hand before anything is cut."""
    for original in journal.originals():
        original.value = original.fetch()


def _reference(root: nn.Module, made: Plan, sample: Mapping[str, Tensor] | None) -> Reference | str:
    """What stock answers, or in words why that cannot be known."""
    if sample is not None:
        return reference(root, sample, sites=False)
    if not probe(root):
        return made.verification
    try:
        return reference(root, sites=False)
    except Exception as error:  # noqa: BLE001  any model may reject a batch that it did not ask for
        return f"not verified: the stock model rejects the probe batch ({error})"


def _settle(root: nn.Module, before: Reference) -> str:
    """Verify and say how it went; or blame, reverse and raise."""
    verdict = verify(root, before)
    if verdict.ok:
        return f"verified: {verdict}"
    verdict = _blame(root, before, verdict)
    raise VerificationError(f"{verdict}. The model was put back.", verdict)


def _blame(root: nn.Module, before: Reference, verdict: Verdict) -> Verdict:
    """Run both once more, watching every site: the price is paid only when something is wrong."""
    mine = [reference(root, sample) for sample in before.samples]
    reverse(root)
    worst: dict[str, float] = {}
    for one in mine:
        for path, error in verify(root, one).sites:
            worst[path] = max(error, worst.get(path, 0.0))
    return replace(verdict, sites=tuple(sorted(worst.items(), key=lambda item: -item[1])))


def _same_again(
    root: nn.Module,
    recipe: Recipe | str,
    backend: str | Backend | None,
    mode: Mode | str,
    keep: Keep | None,
    attention: Attention,
) -> None:
    done: Plan = vars(root)[JOURNAL].plan
    found = resolve(backend, root) if backend is not None else done.context.backend
    wanted = resolve_recipe(recipe, keep=keep, attention=attention)
    if (wanted, found, Mode.parse(mode)) != (done.recipe, done.context.backend, done.context.mode):
        raise PlanError(
            f"the model is already transformed ({describe(root)}) and {wanted.label()!r}, "
            f"{found.name}, {Mode.parse(mode).value}, keep {wanted.keep} was asked for. "
            "Reverse it first."
        )


def _demand_weights(root: nn.Module) -> None:
    tensors = list(root.parameters())
    if tensors and all(tensor.is_meta for tensor in tensors):
        raise SurgeryError("every weight is on meta: load the weights before the transform.")


def _demand_fit(root: nn.Module, made: Plan) -> None:
    known = dict(root.named_modules())
    for claim in made.claims:
        found = type(known[claim.path]).__qualname__ if claim.path in known else "nothing"
        if found != claim.before:
            raise PlanError(
                f"the plan was made for another model: {claim.path or 'the root'} should be a "
                f"{claim.before} and is {found}."
            )


def _demand_whole(root: nn.Module, journal: Journal) -> None:
    """Originals cannot come back into what was cut up: who did it keeps the rounded parts."""
    if any(journal.originals()) and any(map(is_sharded, root.modules())):
        raise SurgeryError(
            "the weights were cast or rounded, and sharded after that: the originals are whole, "
            "and what is sharded is not theirs. Load the model again from its checkpoint."
        )


def _demand_own_classes(root: nn.Module, edits: list[Edit]) -> None:
    """Undo only what is still ours: adapters and wrappers put on since must come off first."""
    known = dict(root.named_modules())
    last = {edit.path: edit.after for edit in edits if edit.slot is Slot.CLASS}
    for path, cls in last.items():
        if path not in known or not carries(type(known[path]), cast(type[nn.Module], cls)):
            found = type(known[path]).__qualname__ if path in known else "nothing"
            if found in getattr(cls, "successors", ()):
                continue
            raise SurgeryError(
                f"{path or 'the model'} is now {found}: the tree was changed after the transform. "
                "Undo that first (unload adapters, remove wrappers), then reverse."
            )
