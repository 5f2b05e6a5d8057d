"""``optimus export``: transform, capture, write, run by the target's own runner, compare, keep.

The folder gets its name last, when what is in it has answered as the stock model does.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from optimus.core.backend import Mode
from optimus.core.engine import apply, reverse
from optimus.core.errors import Refusal, VerificationError
from optimus.core.planner import Plan, plan
from optimus.core.probe import Sample
from optimus.core.verify import CLOSE, Reference, Verdict, reference, verify
from optimus.export.folder import RECORD
from optimus.export.inputs import batches, longest, traced
from optimus.export.program import Runner, write
from optimus.export.targets import TARGETS, ExportError, Target

PACKED = ".unpadded-graph"
RUNS = 5
STEPS = 4


@dataclass(frozen=True, slots=True)
class Figure:
    """One size of batch: the relative error, and the best time of a call in seconds."""

    size: str
    error: float
    seconds: float
    stock_seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """What was written, how large it is, how long that took and how it answers."""

    target: str
    architecture: str
    folder: str
    bytes: int
    weights_bytes: int
    seconds: float
    claims: dict[str, int]
    tolerance: float
    figures: tuple[Figure, ...]

    @property
    def error(self) -> float:
        """The largest error of any size."""
        return max(one.error for one in self.figures)

    def data(self) -> dict[str, object]:
        """JSON-able."""
        return {**asdict(self), "error": self.error}


def export(
    model: nn.Module,
    out: Path,
    target: Target | str,
    *,
    beside: Callable[[Path], object] = lambda folder: None,
    tick: Callable[[str], object] = lambda step: None,
) -> Report:
    """Write ``model``, a transformers model that reads text, to the new folder ``out``.

    ``beside`` writes what else belongs into the folder. The model is as it was afterwards. Raises
    ``ExportError`` where the target is not installed, the model cannot be captured or ``out``
    exists, and ``VerificationError`` where the export answers differently; nothing is left then.
    """
    chosen = TARGETS[target] if isinstance(target, str) else target
    chosen.demand()
    demand_new(out)
    sample = traced(model)
    most = longest(model, chosen)
    stock = stock_answers(model, sample, most)
    tick("captured the stock answers")
    with staged(out) as folder:
        started = time.perf_counter()
        made = _written(model, chosen, sample, most, folder)
        seconds = time.perf_counter() - started
        tick(f"wrote {chosen.name}")
        figures = answered(model, Runner(folder), stock)
        tick("compared five sizes")
        beside(folder)
        report = _report(model, chosen, out, folder, made, figures, seconds)
        text = json.dumps({"export": report.data(), "plan": json.loads(made.to_json())}, indent=2)
        (folder / RECORD).write_text(text + "\n", encoding="utf-8")
        _demand_same(report)
    return report


def _written(model: nn.Module, target: Target, sample: Sample, most: int, folder: Path) -> Plan:
    made = _plan(model, target)
    apply(model, made)
    try:
        write(model, target, sample, most, folder)
    finally:
        reverse(model)
    return made


def _plan(model: nn.Module, target: Target) -> Plan:
    """What is swapped before the graph is captured: whatever the target can run."""
    made = plan(model, mode=Mode.EXPORT)
    if target.packs:
        return made
    why = Refusal(f"{target.name} takes no size that only the run knows")
    left = [claim for claim in made.claims if claim.replacement.endswith(PACKED)]
    return replace(
        made,
        claims=tuple(claim for claim in made.claims if claim not in left),
        refusals=(*made.refusals, *((claim.path, claim.replacement, why) for claim in left)),
    )


def stock_answers(model: nn.Module, sample: Sample, most: int) -> dict[str, Reference]:
    """What the model answers now, at each of the five sizes."""
    made = batches(model, sample, most)
    # The graph has no sites, keys or ties to be compared.
    return {
        size: replace(reference(model, batch, sites=False), keys=frozenset(), ties=())
        for size, batch in made.items()
    }


def answered(
    model: nn.Module, runner: nn.Module, stock: Mapping[str, Reference]
) -> tuple[Figure, ...]:
    """Error and speed of the runner at each size, beside ``model`` as it is."""
    tolerance = tolerated(model)
    found = []
    for size, before in stock.items():
        verdict: Verdict = verify(runner, before, tolerance=tolerance)
        error = float("nan") if verdict.reason else verdict.worst
        found.append(
            Figure(
                size, error, fastest(runner, before.samples[0]), fastest(model, before.samples[0])
            )
        )
    return tuple(found)


def fastest(model: nn.Module, sample: Sample) -> float:
    """The best of a few calls, in seconds."""
    best = float("inf")
    with torch.inference_mode():
        for _ in range(RUNS):
            started = time.perf_counter()
            model(**sample)
            best = min(best, time.perf_counter() - started)
    return best


def tolerated(model: nn.Module) -> float:
    """The largest relative error that another order of the same sums may cause."""
    return CLOSE[next(p.dtype for p in model.parameters() if p.is_floating_point())]


def _report(
    model: nn.Module,
    target: Target,
    out: Path,
    folder: Path,
    made: Plan,
    figures: tuple[Figure, ...],
    seconds: float,
) -> Report:
    claims: dict[str, int] = {}
    for claim in made.claims:
        claims[claim.replacement] = claims.get(claim.replacement, 0) + 1
    return Report(
        target=target.name,
        architecture=type(model).__name__,
        folder=str(out),
        bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        weights_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        seconds=seconds,
        claims=claims,
        tolerance=tolerated(model),
        figures=figures,
    )


def _demand_same(report: Report) -> None:
    wrong = [one for one in report.figures if not one.error <= report.tolerance]
    if wrong:
        raise VerificationError(
            f"{report.target} answers differently at {wrong[0].size}: relative error "
            f"{wrong[0].error:.1e}, tolerance {report.tolerance:.0e}. Nothing was written.",
            Verdict({one.size: one.error for one in report.figures}, report.tolerance),
        )


def demand_new(out: Path, source: Path | None = None) -> None:
    """``ExportError`` where ``out`` exists, has no folder to be in, or lies within ``source``."""
    if out.exists() or out.is_symlink():
        raise ExportError(f"{out} exists: name a new folder, nothing is overwritten.")
    if not out.absolute().parent.is_dir():
        raise ExportError(f"{out.parent}: no such folder to write {out.name} into.")
    if source is not None and source.resolve() in (out.resolve(), *out.resolve().parents):
        raise ExportError(f"{out} is inside {source}: name a folder outside the model's own.")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A hidden folder beside ``out``, which gets its name when all went well and goes otherwise."""
    folder: Path | None = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
        yield folder
        demand_new(out)
        folder.chmod(0o755)
        folder.rename(out)
    except OSError as error:
        raise ExportError(f"cannot write {out}: {error.strerror or error}.") from error
    finally:
        if folder is not None and folder.exists():
            shutil.rmtree(folder, ignore_errors=True)
