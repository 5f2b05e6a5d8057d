"""What pays on this machine, in bounded time: the figures that ``costs`` reads before the shipped.

A layer is measured alone, at the model's own shapes and with random weights: none is loaded. Stock
and ours take turns, over as many layers of the shape as the model has, so that one row finds the
weights where decoding finds them, in memory and not in the cache. Attention is called with what a
model of two layers calls it with.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from optimus.core.backend import Context, Mode, host
from optimus.core.costs import Ratios, key
from optimus.core.engine import apply
from optimus.core.paths import Site, generates, sites
from optimus.core.planner import Claim, Plan
from optimus.core.recipes import Recipe
from optimus.core.registry import Registry
from optimus.core.replacement import Fidelity, Replacement
from optimus.measure import attention, load

Call = Callable[[], object]
Tick = Callable[[str], None]

# One is decoding, the others a short text, a batch of short ones, and a batch of long ones.
ROWS = (1, 8, 64, 512)
KEYS = (32, 128, 512)
RUNS, ROUNDS = 3, 2
# Seconds for one figure: below, a clock and a neighbour decide; above, nothing is learnt.
LEAST, MOST = 0.06, 0.6
# Layers that are called in turn hold this many bytes, more than a cache does.
ENOUGH = 64 << 20
# From here on a product computes more than it reads, and four layers are as good as all.
MANY, FEW = 64, 4
# A guess for the first product, in operations a second; slow, so that the time is kept.
SLOW = 2e10
# Shapes of models people use, for a table without a model: [out, in] in multiples of the width.
WIDTHS, SHAPES = (384, 768, 1024, 2048), ((1, 1), (4, 1), (1, 4))


@dataclass(frozen=True, slots=True)
class Figure:
    """How many times faster than stock a replacement is at ``number`` rows or keys."""

    kind: str
    name: str
    number: int
    unit: str
    ratio: float
    stock_seconds: float


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was measured, and what was not, with the reason."""

    figures: tuple[Figure, ...]
    left: tuple[tuple[str, str], ...]

    def ratios(self) -> Ratios:
        """The figures as a cost table has them."""
        table: Ratios = {}
        for one in self.figures:
            part = table.setdefault(one.kind, {}).setdefault(one.name, {})
            part[str(one.number)] = round(one.ratio, 3)
        return table


@dataclass(frozen=True, slots=True)
class Job:
    """One figure to be found. ``start`` gives the calls of stock and of ours."""

    kind: str
    name: str
    number: int
    unit: str
    operations: float
    start: Callable[[], tuple[Call, Call]]

    def __str__(self) -> str:
        return f"{self.name}, {self.number} {self.unit}"


def jobs(config: Any | None) -> list[Job]:
    """What there is to measure for a model, the quickest first."""
    model = usual() if config is None else load.skeleton(config)
    found: list[Job] = []
    for dtype in _dtypes():
        context = Context(host(), Mode.INFERENCE, dtype, config is None or generates(model))
        found += _linears(model, context)
        if config is not None:
            found += _attention(config, model, context)
    return sorted(found, key=lambda job: job.operations)


def tune(found: list[Job], *, seconds: float, tick: Tick = lambda _: None) -> Tuned:
    """Measure what fits into ``seconds``; ``tick`` is told of each job when it ends."""
    deadline = time.perf_counter() + seconds
    figures: list[Figure] = []
    left: list[tuple[str, str]] = []
    speed = SLOW
    for number, job in enumerate(found):
        rest = deadline - time.perf_counter()
        if rest < (2 * RUNS * ROUNDS + 2) * job.operations / speed:
            left.append((str(job), "no time left"))
        else:
            try:
                ratio, stock = _ratio(job, rest / (len(found) - number))
            except load.LoadError as error:
                left.append((str(job), str(error)))
            else:
                figures.append(Figure(job.kind, job.name, job.number, job.unit, ratio, stock))
                speed = job.operations / stock
        tick(str(job))
    return Tuned(tuple(figures), tuple(left))


@torch.inference_mode()
def _ratio(job: Job, share: float) -> tuple[float, float]:
    """Median over the runs of stock's least time over ours, and stock's least seconds."""
    stock, mine = job.start()
    stock(), mine()
    seconds = min(max(share, LEAST), MOST) / RUNS
    runs = [alternated(stock, mine, seconds=seconds) for _ in range(RUNS)]
    return statistics.median(s / m for s, m in runs), min(s for s, _ in runs)


def alternated(
    stock: Call, mine: Call, *, seconds: float, rounds: int = ROUNDS
) -> tuple[float, float]:
    """The least seconds of each, taken in turn."""
    least = [float("inf")] * 2
    begin = time.perf_counter()
    done = 0
    while done < rounds or time.perf_counter() - begin < seconds:
        for side, call in enumerate((stock, mine)):
            start = time.perf_counter()
            call()
            least[side] = min(least[side], time.perf_counter() - start)
        done += 1
    return least[0], least[1]


def usual() -> nn.Module:
    """Linear layers of the usual shapes, on meta."""
    with torch.device("meta"):
        layers = [nn.Linear(k * w, n * w) for w in WIDTHS for n, k in SHAPES]
        return nn.ModuleList(layers).eval()


def plan_for(rule: Replacement, site: Site, context: Context) -> Plan:
    """Swap this site alone, whatever the tables say of it."""
    name = type(site.module).__qualname__
    claim = Claim(0, site.path, rule.name, rule.fidelity.value, name, rule.mixin.__name__ + name)
    return Plan(
        recipe=Recipe(rule.name, ((rule.name,),)),
        context=context,
        claims=(claim,),
        refusals=(),
        passes=(),
        fidelity=rule.fidelity,
        verification="not verified: it is measured, and not used",
    )


def _dtypes() -> list[torch.dtype]:
    native = "native-bf16" in host().features
    return [torch.float32, torch.bfloat16] if native else [torch.float32]


def _takers(model: nn.Module, context: Context) -> Iterator[tuple[Replacement, Site]]:
    """Every site with the first rule that would take it if speed were no matter."""
    known = [one for one in Registry.installed().find("*") if isinstance(one, Replacement)]
    rules = [rule for rule in known if rule.fidelity is not Fidelity.LOSSY]
    for site in sites(model):
        fitting = (r for r in rules if r.claims(site) and not r.refuses(site, context))
        if rule := next(fitting, None):
            yield rule, site


def _linears(model: nn.Module, context: Context) -> Iterator[Job]:
    """A job for every size and number of rows."""
    alike: dict[str, list[tuple[Replacement, Site]]] = {}
    for rule, site in _takers(model, context):
        if not rule.gated and (size := rule.mixin.size(site.module)):
            alike.setdefault(f"{rule.name} {size}", []).append((rule, site))
    for name, found in alike.items():
        (rule, site), count = found[0], len(found)
        for rows in ROWS:
            if rows > 1 or context.decodes:
                yield _linear_job(name, rule, site.module, count, rows, context)


def _linear_job(
    name: str, rule: Replacement, layer: nn.Module, count: int, rows: int, context: Context
) -> Job:
    weight = cast(nn.Parameter, layer._parameters["weight"])
    layers = max(1, min(count, ENOUGH // (weight.numel() * context.dtype.itemsize)))
    layers = min(layers, FEW) if rows >= MANY else layers

    def start() -> tuple[Call, Call]:
        stock = [_filled(layer, context.dtype) for _ in range(layers)]
        made = plan_for(rule, Site("", stock[0]), context)
        mine = [apply(copy.deepcopy(one), made) for one in stock]
        given = torch.ones(rows, _columns(layer, weight), dtype=context.dtype)
        return _chain(stock, given), _chain(mine, given)

    operations = 2.0 * layers * rows * weight.numel()
    return Job(key(context), name, rows, "rows", operations, start)


def _columns(layer: nn.Module, weight: nn.Parameter) -> int:
    """What goes in: ``Conv1D`` has its weight the other way round."""
    return weight.shape[1] if isinstance(layer, nn.Linear) else weight.shape[0]


def _filled(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The layer off meta, with weights that are no special case for any kernel."""
    generator = torch.Generator().manual_seed(0)
    made = copy.deepcopy(layer).to_empty(device="cpu").to(dtype)
    for parameter in made.parameters():
        parameter.data.normal_(std=0.02, generator=generator)
    return made


def _chain(layers: list[nn.Module], given: torch.Tensor) -> Call:
    def call() -> None:
        for layer in layers:
            layer(given)

    return call


def _attention(config: Any, model: nn.Module, context: Context) -> Iterator[Job]:
    """A job for every gated replacement that takes a site, and number of keys."""
    first: dict[str, tuple[Replacement, Site]] = {}
    for rule, site in _takers(model, context):
        if rule.gated:
            first.setdefault(rule.name, (rule, site))
    for name, (rule, site) in first.items():
        made = plan_for(rule, site, context)
        for keys in attention.lengths(config, KEYS):
            small = attention.Small(config, context.dtype, keys)
            yield Job(key(context), name, keys, "keys", small.operations, _starter(small, made))


def _starter(small: attention.Small, made: Plan) -> Callable[[], tuple[Call, Call]]:
    def start() -> tuple[Call, Call]:
        path = made.claims[0].path
        stock, mine = small.build(), small.build()
        apply(mine, replace(made, claims=_within(made.claims[0], mine)))
        return small.call(stock, path), small.call(mine, path)

    return start


def _within(claim: Claim, model: nn.Module) -> tuple[Claim, ...]:
    """The claim, where the smaller model has its site."""
    if claim.path not in dict(model.named_modules()):
        raise load.LoadError(f"a model of two layers has no {claim.path}.")
    return (claim,)
