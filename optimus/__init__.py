"""Faster and smaller models, reversibly: transform, verify, reverse."""

from optimus.core.backend import Backend
from optimus.core.engine import apply, is_transformed, reverse, transform, transformed
from optimus.core.planner import Plan, plan
from optimus.core.recipes import Recipe
from optimus.core.verify import Reference, Verdict, reference, verify
from optimus.export.load import load

__all__ = [
    "Backend",
    "Plan",
    "Recipe",
    "Reference",
    "Verdict",
    "apply",
    "is_transformed",
    "load",
    "plan",
    "reference",
    "reverse",
    "transform",
    "transformed",
    "verify",
]
