"""A recipe resolved against one model: claims, refusals, passes. Data; nothing has been touched."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import nn

from optimus.core.backend import Backend, Context, Mode, resolve
from optimus.core.costs import Measured
from optimus.core.errors import (
    BackendUnavailableError,
    ConflictError,
    NothingToDoError,
    PlanError,
    Refusal,
    SurgeryError,
)
from optimus.core.originals import Keep
from optimus.core.paths import Site, generates, is_sharded, sites, unwrap
from optimus.core.probe import describe_probe
from optimus.core.recipes import OPTIONAL, STOCK, Attention, Recipe, resolve_recipe
from optimus.core.registry import Registry
from optimus.core.replacement import Fidelity, Pass, Replacement

JOURNAL = "_optimus_journal"


@dataclass(frozen=True, slots=True)
class Claim:
    """One site that one replacement takes.

    ``measured`` says what the claim rests on or costs, and ``shortest`` from which number of keys
    on it holds: a shorter call takes the stock path.
    """

    stage: int
    path: str
    replacement: str
    fidelity: str
    before: str
    after: str
    measured: str = ""
    shortest: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be done, what will not and why, and how it will be checked."""

    recipe: Recipe
    context: Context
    claims: tuple[Claim, ...]
    refusals: tuple[tuple[str, str, Refusal], ...]
    passes: tuple[str, ...]
    fidelity: Fidelity
    verification: str

    def to_json(self) -> str:
        """The plan as JSON; ``from_json`` is its inverse."""
        return json.dumps(asdict(self), default=_plain, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan from ``to_json``; ``PlanError`` where the text is none."""
        try:
            return _parse(json.loads(text))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"this is not the JSON of a plan: {error}") from error

    def __str__(self) -> str:
        backend, dtype = self.context.backend.name, _plain(self.context.dtype)
        rows = [("", "count", "name", "fidelity", "what")]
        rows += [("pass", "", name, "", "the whole model") for name in self.passes]
        claimed = Counter(
            (c.replacement, c.fidelity, f"{c.before} -> {c.after}", c.measured) for c in self.claims
        )
        refused = Counter((name, refusal.reason) for _, name, refusal in self.refusals)
        rows += [
            ("claim", str(count), name, fidelity, "; ".join(filter(None, (change, why))))
            for (name, fidelity, change, why), count in claimed.items()
        ]
        rows += [("leave", str(n), name, "", why) for (name, why), n in refused.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        head = f"recipe {self.recipe.label()} on {backend}, {dtype}, {self.context.mode.value}"
        lines = [head, f"check: {self.verification}"]
        if self.fidelity is Fidelity.LOSSY and self.recipe.keep == "none":
            lines.append("irreversible: the originals are not kept")
        return "\n".join([*lines, *_aligned(rows, widths)])


def _aligned(rows: list[tuple[str, str, str, str, str]], widths: list[int]) -> Iterator[str]:
    for kind, count, name, fidelity, what in rows:
        cells = (kind.ljust(widths[0]), count.rjust(widths[1]), name.ljust(widths[2]))
        yield "  ".join((*cells, fidelity.ljust(widths[3]), what)).rstrip()


def _plain(value: object) -> object:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return sorted(value) if isinstance(value, frozenset) else cast(Mode | Fidelity, value).value


def _parse(data: dict[str, Any]) -> Plan:
    recipe, context = data["recipe"], data["context"]
    backend = context["backend"]
    return Plan(
        recipe=Recipe(
            recipe["name"],
            tuple(tuple(stage) for stage in recipe["stages"]),
            tuple(recipe["skip"]),
            recipe["keep"],
            tuple((glob, name) for glob, name in recipe["overrides"]),
            recipe["attention"],
        ),
        context=Context(
            Backend(**{**backend, "features": frozenset(backend["features"])}),
            Mode(context["mode"]),
            getattr(torch, context["dtype"]),
            context["decodes"],
        ),
        claims=tuple(Claim(**claim) for claim in data["claims"]),
        refusals=tuple((path, name, Refusal(**why)) for path, name, why in data["refusals"]),
        passes=tuple(data["passes"]),
        fidelity=Fidelity(data["fidelity"]),
        verification=data["verification"],
    )


def plan(
    model: nn.Module,
    recipe: Recipe | str = "auto",
    *,
    backend: str | Backend | None = None,
    mode: Mode | str = Mode.INFERENCE,
    keep: Keep | None = None,
    attention: Attention = "auto",
    registry: Registry | None = None,
) -> Plan:
    """What ``transform`` would do to ``model``, which may be on meta.

    Raises ``PlanError`` for an unknown recipe or an already transformed model,
    ``BackendUnavailableError`` for a recipe that this hardware cannot run.
    """
    root = unwrap(model)
    if isinstance(root, torch.jit.ScriptModule):
        raise SurgeryError("a scripted model cannot be changed. Transform it before scripting.")
    if JOURNAL in vars(root):
        raise PlanError(f"the model is already transformed ({describe(root)}). Reverse it first.")
    found = resolve(backend, root)
    chosen = resolve_recipe(recipe, keep=keep, attention=attention)
    context = Context(found, Mode.parse(mode), _dtype(root), generates(root))
    return _Planner(root, chosen, registry or Registry.installed()).run(context)


def describe(root: nn.Module) -> str:
    """The recipe, backend, mode and keep of a transformed model, in a few words."""
    done: Plan = vars(root)[JOURNAL].plan
    backend, mode = done.context.backend.name, done.context.mode.value
    return f"recipe {done.recipe.label()}, {backend}, {mode}, keep {done.recipe.keep}"


def _dtype(model: nn.Module) -> torch.dtype:
    floats = Counter(t.dtype for t in model.parameters() if t.is_floating_point())
    return floats.most_common(1)[0][0] if floats else torch.get_default_dtype()


def _already_quantized(model: nn.Module) -> Refusal | None:
    """What transformers says of a checkpoint that a quantizer made."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else config.quant_method
    name = getattr(method, "value", method)
    return Refusal(f"the checkpoint is already quantized ({name}); load the one it was made of")


def _is_usual(item: Replacement | Pass) -> bool:
    """Whether who asks for everything gets it."""
    return item.fidelity is not Fidelity.LOSSY and not item.by_name


def _owners(model: nn.Module) -> dict[int, dict[str, str]]:
    """For every parameter object: the modules that hold it, and its name in each."""
    owners: dict[int, dict[str, str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), {})[path] = f"{path}.{name}".lstrip(".")
    return owners


class _Planner:
    """One walk over the stages. Claims of a stage are all made on the untouched tree."""

    def __init__(self, model: nn.Module, recipe: Recipe, registry: Registry) -> None:
        self.model, self.recipe, self.registry = model, recipe, registry
        self.sites = [s for s in sites(model) if not self._skipped(s.path)]
        self.ties = _owners(model)
        self.sharded = [path for path, m in model.named_modules() if is_sharded(m)]
        self.claims: dict[str, Claim] = {}
        self.refusals: list[tuple[str, str, Refusal]] = []
        self.passes: list[str] = []
        self.worst = Fidelity.EXACT
        self.quantized = _already_quantized(model)
        self.parted: dict[tuple[str, Context], Refusal | None] = {}
        paths = [site.path for site in self.sites]
        for glob, name in recipe.overrides:
            if (glob, name) not in OPTIONAL and not any(fnmatchcase(p, glob) for p in paths):
                raise PlanError(f"the override of {glob!r} fits no module of the model.")

    def run(self, context: Context) -> Plan:
        for stage, patterns in enumerate(self.recipe.in_order()):
            taken: dict[str, str] = {}
            for pattern in patterns:
                context = self._passes(pattern, context)
                self._replacements(stage, pattern, context, taken)
        return Plan(
            recipe=self.recipe,
            context=context,
            claims=tuple(self.claims.values()),
            refusals=tuple(self.refusals),
            passes=tuple(self.passes),
            fidelity=self.worst,
            verification=describe_probe(self.model),
        )

    def _tied(self, site: Site, rule: Replacement) -> Refusal | None:
        """A new layout for one of two owners would untie them."""
        if not rule.mixin.bridges:
            return None
        others = self._owners_besides(site)
        named = (
            name
            for owner, name in others.items()
            if not rule.mixin.allows_tie(self.model.get_submodule(owner))
        )
        return next((Refusal(f"tied to {name}") for name in named), None)

    def _owners_besides(self, site: Site) -> dict[str, str]:
        """Who else holds a parameter of the site, and under which name."""
        shared = (self.ties.get(id(p), {}) for p in site.module.parameters(recurse=False))
        return {
            owner: name for owners in shared for owner, name in owners.items() if owner != site.path
        }

    def _skipped(self, path: str) -> bool:
        return any(fnmatchcase(path, pattern) for pattern in self.recipe.skip)

    def _find(self, pattern: str) -> list[Replacement | Pass]:
        found = self.registry.find(pattern)
        return [i for i in found if pattern != "*" or _is_usual(i)]

    def _passes(self, pattern: str, context: Context) -> Context:
        found = self._meant(pattern, context)
        for item in found:
            named = item.name == pattern or (item.by_name and len(found) == 1)
            if refusal := item.refuses(self.model, context):
                if named or item.concerns(self.model):
                    self._refuse("", item.name, refusal, named=named)
            else:
                self.passes.append(item.name)
                self._degrade(item.fidelity)
                context = item.settles(context)
        return context

    def _meant(self, pattern: str, context: Context) -> list[Pass]:
        """Who names a kind of pass means the one for this hardware, where there is one."""
        passes = [item for item in self._find(pattern) if not isinstance(item, Replacement)]
        found = [item for item in passes if item.name not in self.passes]
        here = [item for item in found if context.backend.name in item.backends]
        return here if pattern != "*" and here else found

    def _replacements(
        self, stage: int, pattern: str, context: Context, taken: dict[str, str]
    ) -> None:
        rules = self._rules(pattern)
        lossy = bool(rules) and all(rule.fidelity is Fidelity.LOSSY for rule in rules)
        before = len(self.claims)
        near: list[Refusal] = []
        asked = False
        fitting: dict[tuple[type, str], list[Replacement]] = {}
        for site in self.sites:
            name = self.recipe.lossy_at(site.path, pattern) if lossy else pattern
            kind = type(site.module), name
            if kind not in fitting:
                fitting[kind] = self._fitting(name, site, context)
            for rule in fitting[kind]:
                if site.path in taken and taken[site.path] != pattern:
                    raise ConflictError(
                        f"{taken[site.path]!r} and {pattern!r} both claim "
                        f"{site.path or 'the model'}. Put them in different stages, or narrow one."
                    )
                if site.path in self.claims:
                    break
                if refusal := self._refusal(site, rule, context):
                    self._refuse(site.path, rule.name, refusal)
                    near.append(refusal)
                    continue
                self._claim(stage, site, rule, rule.measured(site, context))
                taken[site.path] = pattern
                asked = asked or name == pattern
                break
        # Who asked for fewer bits and got none would believe otherwise; an override's are not his.
        none = len(self.claims) == before or (not asked and any(why.hardware for why in near))
        if ("*" not in pattern or lossy) and rules and none:
            self._nothing(pattern, near)

    def _fitting(self, name: str, site: Site, context: Context) -> list[Replacement]:
        """A rule for other hardware is named only where there is none for this one."""
        fitting = [rule for rule in self._rules(name) if rule.claims(site)]
        here = [rule for rule in fitting if context.backend.name in rule.backends]
        return here or fitting

    def _rules(self, pattern: str) -> list[Replacement]:
        if pattern == STOCK:
            return []
        return [item for item in self._find(pattern) if isinstance(item, Replacement)]

    def _refusal(self, site: Site, rule: Replacement, context: Context) -> Refusal | None:
        if rule.fidelity is Fidelity.LOSSY and self.quantized is not None:
            return self.quantized
        if rule.mixin.attends and self.recipe.attention != "auto":
            return Refusal(f"attention={self.recipe.attention!r} was asked for")
        unfit = self._split(site, rule) or rule.refuses(site, context)
        unfit = unfit or rule.too_slow(site, context)
        return unfit or self._tied(site, rule) or self._parted(rule, context)

    def _split(self, site: Site, rule: Replacement) -> Refusal | None:
        """A new layout of what is a part of a weight, or soon will be: others keep books on it."""
        if rule.mixin.bridges and any(
            f"{site.path}.".startswith(f"{path}.".lstrip(".")) for path in self.sharded
        ):
            return Refusal("its weights are sharded; transform first, then shard")
        return None

    def _parted(self, rule: Replacement, context: Context) -> Refusal | None:
        """Why a rule for all of its sites or none takes none."""
        if not rule.together:
            return None
        if (rule.name, context) not in self.parted:
            self.parted[rule.name, context] = self._left_alone(rule, context)
        return self.parted[rule.name, context]

    def _left_alone(self, rule: Replacement, context: Context) -> Refusal | None:
        every = [site for site in sites(self.model) if rule.claims(site)]
        if missing := rule.lacks(every):
            return Refusal(f"all of its sites or none, and there is no {missing}")
        for site in every:
            claim = self.claims.get(site.path)
            if self._skipped(site.path):
                return Refusal(f"all of its sites or none, and {site.path} is skipped")
            if claim is not None and claim.replacement != rule.name:
                return Refusal(f"all of its sites or none, and {site.path} is {claim.replacement}")
            if why := rule.refuses(site, context):
                return Refusal(f"all of its sites or none, and {site.path}: {why.reason}")
        return None

    def _nothing(self, pattern: str, near: list[Refusal]) -> None:
        why = Counter(near).most_common(1)[0][0] if near else None
        kind = BackendUnavailableError if why is not None and why.hardware else NothingToDoError
        reason = "no module of the model is of its kind" if why is None else why.reason
        raise kind(f"{pattern} found nothing to do: {reason}.")

    def _claim(self, stage: int, site: Site, rule: Replacement, found: Measured | None) -> None:
        name = type(site.module).__qualname__
        self.claims[site.path] = Claim(
            stage=stage,
            path=site.path,
            replacement=rule.name,
            fidelity=rule.fidelity.value,
            before=name,
            after=rule.mixin.__name__ + name,
            measured=self._remark(site, rule) if found is None else str(found),
            shortest=None if found is None else found.shortest,
        )
        self._degrade(rule.fidelity)

    def _remark(self, site: Site, rule: Replacement) -> str:
        """What its mixin says, and what it costs on top where a copy of what stays is rounded."""
        shared = ", ".join(self._owners_besides(site).values()) if rule.mixin.rounds else ""
        stays = f"on top of {shared}, which stays as it is" if shared else ""
        return "; ".join(filter(None, (rule.mixin.remark(), stays)))

    def _refuse(self, path: str, name: str, refusal: Refusal, *, named: bool = False) -> None:
        if named:
            kind = BackendUnavailableError if refusal.hardware else NothingToDoError
            raise kind(f"recipe {self.recipe.name!r} cannot run: {refusal.reason}.")
        self.refusals.append((path, name, refusal))

    def _degrade(self, fidelity: Fidelity) -> None:
        order = list(Fidelity)
        self.worst = max(self.worst, fidelity, key=order.index)
