"""A tiny model of every type that the installed transformers has, and inputs to call it with."""

from .configs import quiet, tiny
from .inputs import inputs
from .models import build, build_from, heads, model_types
from .overrides import CANNOT, NEEDS

__all__ = [
    "CANNOT",
    "NEEDS",
    "build",
    "build_from",
    "heads",
    "inputs",
    "model_types",
    "quiet",
    "tiny",
]
