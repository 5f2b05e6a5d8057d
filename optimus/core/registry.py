"""What optimus knows how to do, by name.

Registration is a value, not an effect: a leaf file ends in ``ARCHITECTURE = ...``, in several
``ARCHITECTURES = (...)`` or in ``PASSES = (...)`` and the registry reads it. Importing a leaf
changes nothing, and a test makes a registry of its own.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from importlib.metadata import entry_points
from types import ModuleType

from optimus.core.errors import RegistryError
from optimus.core.replacement import Architecture, Pass, Replacement

ENTRY_POINTS = "optimus.architectures"


class Registry:
    """Architectures and passes. Names are unique, or ``RegistryError``; a model type may have
    several architectures.
    """

    def __init__(self, architectures: Iterable[Architecture], passes: Iterable[Pass] = ()) -> None:
        self.architectures = tuple(sorted(architectures, key=lambda a: a.model_type))
        self.passes = tuple(passes)
        self.replacements = tuple(r for a in self.architectures for r in a.replacements)
        items: list[Replacement | Pass] = [*self.replacements, *self.passes]
        names = Counter(item.name for item in items)
        if twice := [name for name, count in names.items() if count > 1]:
            raise RegistryError(f"two registrations under one name: {', '.join(twice)}")
        self._by_name = {item.name: item for item in items}

    @classmethod
    @functools.cache
    def installed(cls) -> Registry:
        """Every leaf file of optimus, and what other packages announce as entry points."""
        import optimus.passes
        import optimus.replacements

        leaves = [*_leaves(optimus.replacements), *_leaves(optimus.passes)]
        architectures = [leaf.ARCHITECTURE for leaf in leaves if hasattr(leaf, "ARCHITECTURE")]
        architectures += [one for leaf in leaves for one in getattr(leaf, "ARCHITECTURES", ())]
        architectures += [point.load() for point in entry_points(group=ENTRY_POINTS)]
        passes = [one for leaf in leaves for one in getattr(leaf, "PASSES", ())]
        return cls(architectures, passes)

    def find(self, pattern: str) -> tuple[Replacement | Pass, ...]:
        """What the glob names, in registration order; ``RegistryError`` lists the nearest."""
        found = tuple(item for name, item in self._by_name.items() if fnmatchcase(name, pattern))
        if not found:
            near = difflib.get_close_matches(pattern, self._by_name, n=3, cutoff=0.4)
            hint = f"; the nearest are {', '.join(near)}" if near else ""
            raise RegistryError(f"nothing is registered as {pattern!r}{hint}")
        return found

    def __getitem__(self, name: str) -> Replacement | Pass:
        return self._by_name[name] if name in self._by_name else self.find(name)[0]


def _leaves(package: ModuleType) -> list[ModuleType]:
    names = [info.name for info in pkgutil.iter_modules(package.__path__)]
    public = sorted(name for name in names if not name.startswith("_"))
    return [importlib.import_module(f"{package.__name__}.{name}") for name in public]
