"""The same answers? A reference of the stock model, and a verdict against it.

The error of an output is ‖transformed − stock‖ / ‖stock‖ in float64 over the real tokens: what a
mask calls padding has no defined answer. A stock model that answers NaN proves nothing, and the
verdict says so instead of passing NaN against NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from optimus.core.backend import LAZY, launch
from optimus.core.errors import PlanError
from optimus.core.paths import ties, unwrap
from optimus.core.planner import JOURNAL
from optimus.core.probe import Sample, probe
from optimus.core.replacement import Fidelity, Mixin

# Largest relative error that reordering the same arithmetic may cause.
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# And the whole network's drift at fewer digits, by the last word of a replacement's or pass's name:
# the next round number above what all-MiniLM-L6-v2 does to words without meaning (0.04, 0.094,
# 0.31, 0.33, 0.41, 0.29, 0.12), which is worse than what it does to text, or random models to
# anything.
LOSSY = {
    "bf16": 5e-2,
    "int8": 5e-2,
    "int8-dynamic": 1e-1,
    "int4": 4e-1,
    "int4-g64": 4e-1,
    "int4-g128": 5e-1,
    "int4-asymmetric": 4e-1,
    "fp8": 2e-1,
}
OTHER = 5e-2


@dataclass(frozen=True, slots=True)
class Reference:
    """What the stock model answered, and what it was made of."""

    samples: tuple[Sample, ...]
    outputs: tuple[dict[str, Tensor], ...]
    sites: tuple[dict[str, Tensor], ...]
    keys: frozenset[str]
    ties: tuple[frozenset[str], ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison. ``drift``: relative error per output.

    ``sites``: by how much each raised the error over all that ran before it, the worst first.
    """

    drift: dict[str, float]
    tolerance: float
    sites: tuple[tuple[str, float], ...] = ()
    keys_lost: frozenset[str] = frozenset()
    keys_added: frozenset[str] = frozenset()
    ties_broken: tuple[frozenset[str], ...] = ()
    reason: str = field(default="")

    @property
    def worst(self) -> float:
        """The largest error of any output."""
        return max(self.drift.values(), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether every answer is within the tolerance and nothing was lost."""
        return not (self.reason or self.keys_lost or self.ties_broken) and all(
            error <= self.tolerance for error in self.drift.values()
        )

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        parts = [f"largest relative error {self.worst:.1e}, tolerance {self.tolerance:.0e}"]
        parts += [f"keys lost: {', '.join(sorted(self.keys_lost))}"] if self.keys_lost else []
        parts += ["ties broken"] if self.ties_broken else []
        blamed = ", ".join(f"{path} ({error:.1e})" for path, error in self.sites[:3])
        parts += [f"worst sites: {blamed}"] if blamed else []
        return "; ".join(parts)


def reference(model: nn.Module, sample: Sample | None = None, *, sites: bool = True) -> Reference:
    """Run the model as it is on ``sample`` or on a probe; ``PlanError`` where there is neither.

    ``sites`` also keeps what every module with parameters of its own answered, for blame.
    """
    root = unwrap(model)
    samples = (sample,) if sample is not None else probe(root)
    if not samples:
        raise PlanError("no probe batch can be built for this model; give a sample.")
    runs = [_run(root, one, sites=sites) for one in samples]
    return Reference(
        samples, tuple(r[0] for r in runs), tuple(r[1] for r in runs), _keys(root), ties(root)
    )


def verify(model: nn.Module, against: Reference, *, tolerance: float | None = None) -> Verdict:
    """Run the model on the reference's samples and compare.

    ``tolerance`` defaults to that of the plan the model was transformed by; a stock model is held
    to bitwise equality.
    """
    root = unwrap(model)
    again = [_run(root, s, sites=bool(any(against.sites))) for s in against.samples]
    drift: dict[str, float] = {}
    blame: dict[str, float] = {}
    reason = ""
    for sample, stock, stock_sites, (outputs, mine) in zip(
        against.samples, against.outputs, against.sites, again, strict=True
    ):
        mask = sample.get("attention_mask")
        if bad := [name for name, value in stock.items() if not _finite(value, mask)]:
            reason = f"the stock model's own {bad[0]} is not finite: nothing can be verified by it"
        for name, value in stock.items():
            drift[name] = max(drift.get(name, 0.0), _error(outputs.get(name), value, mask))
        so_far = 0.0
        for path, value in stock_sites.items():
            error = _error(mine.get(path), value, mask)
            # What ran before has passed its own error on; a site is to blame for the rise.
            blame[path] = max(blame.get(path, 0.0), error - so_far)
            so_far = max(so_far, error)
    keys = _keys(root)
    return Verdict(
        drift=drift,
        tolerance=_tolerance(root) if tolerance is None else tolerance,
        sites=tuple(sorted(blame.items(), key=lambda item: -item[1])),
        keys_lost=against.keys - keys,
        keys_added=keys - against.keys,
        ties_broken=tuple(group for group in against.ties if group not in ties(root)),
        reason=reason or ("the model gave no tensor to compare" if not drift else ""),
    )


def worth(model: nn.Module, sample: Sample, mixins: Mapping[str, type[Mixin]]) -> dict[str, Tensor]:
    """Calibration: by the name of each parameter that the ``mixins`` at their paths will round, how
    much an error in each input feature counts.

    One forward of the model as it is; padding does not count.
    """
    root, mask = unwrap(model), sample.get("attention_mask")
    found: dict[str, list[Tensor]] = {}

    def note(path: str, mixin: type[Mixin]) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor) and args[0].numel():
                seen = mixin.importance(module, _real(args[0], mask), *args[1:])
                for key, value in seen.items():
                    found.setdefault(f"{path}.{key}".lstrip("."), []).append(value)

        return hook

    handles = [
        root.get_submodule(path).register_forward_pre_hook(note(path, mixin))
        for path, mixin in mixins.items()
    ]
    try:
        with _evaluating(root):
            root(**sample)
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.stack(seen).mean(0) for name, seen in found.items()}


def _tolerance(root: nn.Module) -> float:
    journal = vars(root).get(JOURNAL)
    if journal is None or journal.plan.fidelity is Fidelity.EXACT:
        return 0.0
    if journal.plan.fidelity is not Fidelity.LOSSY:
        return CLOSE.get(journal.plan.context.dtype, 0.0)
    claims = (c for c in journal.plan.claims if c.fidelity == Fidelity.LOSSY.value)
    names = [*journal.plan.passes, *(claim.replacement for claim in claims)]
    return max(LOSSY.get(name.rpartition(".")[2], OTHER) for name in names)


def _keys(root: nn.Module) -> frozenset[str]:
    # The tables and not state_dict(), which would unpack the whole model at once.
    names = {name for name, _ in root.named_parameters(remove_duplicate=False)}
    for path, module in root.named_modules(remove_duplicate=False):
        kept = module._buffers.keys() - module._non_persistent_buffers_set
        names |= {f"{path}.{name}".lstrip(".") for name in kept}
    return frozenset(names)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off for the probe, and every module's own flag back afterwards."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _run(
    model: nn.Module, sample: Sample, *, sites: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    seen: dict[str, Tensor] = {}

    def watch(path: str) -> Any:
        def hook(module: nn.Module, args: object, output: object) -> None:
            if isinstance(first := next(_tensors(output, ""), ("", None))[1], Tensor):
                seen[path] = first

        return hook

    watched = [
        (path, m)
        for path, m in model.named_modules()
        if sites and any(True for _ in m.parameters(recurse=False))
    ]
    handles = [module.register_forward_hook(watch(path)) for path, module in watched]
    try:
        with _evaluating(model):
            output = model(**_fitting(model, sample))
    finally:
        for handle in handles:
            handle.remove()
    return _settled(dict(_tensors(output, ""))), _settled(seen)


def _settled(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a lazy device is asked for is computed now, and compared elsewhere.

    Each comparison of numbers would be a graph of its own, to be compiled: 20 of them for the
    verdict on a llama of two layers, 25 s of one core.
    """
    lazy = {value.device for value in values.values() if value.device.type in LAZY}
    for device in lazy:
        launch(device)
    return {name: v.cpu() if v.device in lazy else v for name, v in values.items()}


def _fitting(model: nn.Module, sample: Sample) -> Sample:
    """Real-valued inputs in the dtype that a lossy plan computes in, as its caller would give."""
    journal = vars(model).get(JOURNAL)
    if journal is None or journal.plan.fidelity is not Fidelity.LOSSY:
        return sample
    dtype: torch.dtype = journal.plan.context.dtype
    return {key: _cast(value, dtype) for key, value in sample.items()}


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _tensors(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output, named; caches and other objects are passed over."""
    if isinstance(value, Tensor):
        yield name or "output", value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{name}.{index}".lstrip("."))


def _real(value: Tensor, mask: Tensor | None) -> Tensor:
    """The entries that a mask calls real; a packed ``[1, total, ...]`` has no others."""
    if mask is None or value.ndim < 2:
        return value
    mask = mask.to(value.device)
    if value.shape[:2] == mask.shape:
        return value[mask.bool()]
    total = int(mask.sum())
    return value[0] if value.shape[:2] == (1, total) else value


def _finite(value: Tensor, mask: Tensor | None) -> bool:
    return bool(torch.isfinite(_real(value, mask)).all())


def _error(mine: Tensor | None, stock: Tensor, mask: Tensor | None) -> float:
    if mine is None:
        return float("inf")
    a, b = _real(mine, mask), _real(stock, mask)
    if a.shape != b.shape:
        return float("inf")
    if torch.equal(a, b):
        return 0.0
    a, b = a.double(), b.double()
    error = float((a - b).norm() / b.norm().clamp_min(torch.finfo(torch.float64).tiny))
    return error if error == error else float("inf")
