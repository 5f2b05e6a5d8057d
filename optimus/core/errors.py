"""What can go wrong, as a tree, and the one thing that is not an error: a refusal.

OptimusError
├── RegistryError (ValueError)            unknown or duplicate name
├── PlanError (ValueError)                the plan does not fit the model or the request
│   ├── ConflictError                     two claims on one site
│   └── NothingToDoError                  a name in the recipe matched nothing
├── BucketError (ValueError)              a call of generate that no bucket holds
├── SurgeryError (RuntimeError)           the model may not be cut here
├── VerificationError (AssertionError)    the answers changed; the model has been reversed
├── IrreversibleError (RuntimeError)      the originals are gone
└── BackendUnavailableError (RuntimeError) this hardware cannot, or optimus cannot on it yet

Each also inherits the builtin that it refines, so that callers can catch it without optimus.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optimus.core.verify import Verdict


class OptimusError(Exception):
    """Base of every error that optimus raises on purpose."""


class RegistryError(OptimusError, ValueError):
    """A name that no replacement, pass or recipe has, or that two have."""


class PlanError(OptimusError, ValueError):
    """A plan that cannot be made, or that was made for another model."""


class ConflictError(PlanError):
    """Two patterns of one stage that would take the same site."""


class NothingToDoError(PlanError):
    """A replacement or pass was asked for by name and no site took it."""


class BucketError(OptimusError, ValueError):
    """A prompt or a batch that generation in static shapes has no bucket for."""


class SurgeryError(OptimusError, RuntimeError):
    """The model may not be cut at this site: patched, sharded, restructured."""


class VerificationError(OptimusError, AssertionError):
    """The transformed model answered differently; it has already been reversed."""

    def __init__(self, message: str, verdict: Verdict) -> None:
        super().__init__(message)
        self.verdict = verdict


class IrreversibleError(OptimusError, RuntimeError):
    """The originals were not kept, or cannot be read back unchanged."""


class BackendUnavailableError(OptimusError, RuntimeError):
    """The backend is not on this machine, or a recipe is not to be had on it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a site was left alone. A value, not an exception.

    ``hardware``: the machine is the reason, so that asking by name is answered with
    ``BackendUnavailableError``.
    """

    reason: str
    hardware: bool = False
