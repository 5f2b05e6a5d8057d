"""The rules of the house, checked on the source: layers, lean import, sizes, forbidden patterns."""

from __future__ import annotations

import ast
import doctest
import importlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import optimus

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "optimus"
SOURCES = sorted(PACKAGE.rglob("*.py"))
EVERYTHING = sorted(
    p for top in ("optimus", "tests", "benchmarks") for p in (ROOT / top).rglob("*.py")
)

# Lower may not import higher. Leaves are found by the registry and imported by nobody else.
LAYERS = {
    "optimus.core.errors": 0,
    "optimus.core.memory": 0,
    "optimus.core.paths": 0,
    "optimus.ops": 1,
    "optimus.core.surgery": 1,
    "optimus.core.canonical": 1,
    "optimus.core.backend": 1,
    "optimus.core.costs": 1.5,
    "optimus.core.originals": 1,
    "optimus.core.recipes": 1.5,
    "optimus.core.probe": 1,
    "optimus.core.replacement": 2,
    "optimus.replacements": 2.5,
    "optimus.generation": 2.25,
    "optimus.passes": 2.5,
    "optimus.core.registry": 3,
    "optimus.core.planner": 4,
    "optimus.core.verify": 5,
    "optimus.core.engine": 5,
    "optimus.bettertransformer": 6,
    "optimus.export": 6,
    "optimus.measure": 6,
    "optimus.cli": 7,
}
HEAVY = ("transformers", "accelerate", "rich", "safetensors")


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _layer(module: str) -> float | None:
    names = [name for name in LAYERS if module == name or module.startswith(name + ".")]
    return LAYERS[max(names, key=len)] if names else None


def _imports(tree: ast.AST) -> Iterator[str]:
    """Names imported at run time; what only a type checker sees binds nobody."""
    if isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING":
        return
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom) and tree.module:
        yield tree.module
    for node in ast.iter_child_nodes(tree):
        yield from _imports(node)


def _public(tree: ast.Module | ast.ClassDef) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            # A setter is documented where its property is.
            if not any(ast.unparse(d).endswith(".setter") for d in node.decorator_list):
                yield node
            if isinstance(node, ast.ClassDef):
                yield from _public(node)


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def test_every_module_has_a_layer() -> None:
    """A new file must say where it stands."""
    homeless = [_module(p) for p in SOURCES if _layer(_module(p)) is None]
    assert homeless == ["optimus", "optimus.core"]


@pytest.mark.parametrize("path", SOURCES, ids=_module)
def test_layers(path: Path) -> None:
    """A module imports only from its own row and from rows below it."""
    mine = _layer(_module(path))
    found = [name for name in _imports(ast.parse(path.read_text())) if name.startswith("optimus")]
    if mine is None:
        return
    above = [name for name in found if (_layer(name) or 0) > mine]
    # The registry is the one that knows the leaves; it lists their packages and names no leaf.
    assert above == [] or mine == LAYERS["optimus.core.registry"]


def test_core_knows_no_leaf() -> None:
    """The core names no architecture and no pass; the registry names only the two packages."""
    named = {
        (_module(path), name)
        for path in (PACKAGE / "core").glob("*.py")
        for name in _imports(ast.parse(path.read_text()))
        if name.startswith(("optimus.replacements", "optimus.passes"))
    }
    registry = "optimus.core.registry"
    assert named == {(registry, "optimus.replacements"), (registry, "optimus.passes")}


@pytest.mark.parametrize("path", SOURCES, ids=_module)
def test_nothing_heavy_at_import(path: Path) -> None:
    """Targets are strings: no file imports transformers or friends at module level."""
    tree = ast.parse(path.read_text())
    top = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    names = [name for node in top for name in _imports(node)]
    screen = _module(path).startswith("optimus.cli") or path.name in ("report.py", "alternate.py")
    allowed = ("rich",) if screen else ()
    assert [n for n in names if n.split(".")[0] in HEAVY and n.split(".")[0] not in allowed] == []


def test_only_the_screen_imports_rich() -> None:
    """rich belongs to the command line and the report."""
    users = {
        _module(path)
        for path in SOURCES
        for name in _imports(ast.parse(path.read_text()))
        if name.split(".")[0] == "rich"
    }
    assert all(u.startswith(("optimus.cli", "optimus.measure")) for u in users), users


def test_sizes() -> None:
    """No file over 400 lines, no function over 50, and a median function under 10."""
    long_files = [p.name for p in EVERYTHING if len(p.read_text().splitlines()) > 400]
    long_functions = [
        f"{p.name}:{name} {n}" for p in EVERYTHING for name, n in _functions(p) if n > 50
    ]
    lengths = [n for p in SOURCES for _, n in _functions(p)]
    assert (long_files, long_functions) == ([], [])
    assert statistics.median(lengths) < 10


def test_forbidden_patterns() -> None:
    """No pickle, no junk drawers, no patched classes or instances, no hooks left on models."""
    drawers = [p.name for p in SOURCES if p.stem in ("utils", "helpers", "base")]
    forbidden = ("torch.load(", "torch.save(", "import pickle", "register_forward_", ".forward = ")
    found = [
        (p.name, word)
        for p in SOURCES
        for word in forbidden
        if word in p.read_text() and (p.name, word) != ("verify.py", "register_forward_")
    ]
    assert (drawers, found) == ([], [])


def test_public_names() -> None:
    """What is exported is sorted, exists, and says what it does."""
    assert list(optimus.__all__) == sorted(optimus.__all__)
    assert [n for n in optimus.__all__ if not getattr(optimus, n).__doc__] == []


def test_public_docstrings() -> None:
    """Every public class, function and method of the package is documented."""
    inherited = ("forward", "accepts", "setup")
    bare = [
        f"{_module(path)}.{node.name}"
        for path in SOURCES
        for node in _public(ast.parse(path.read_text()))
        if not ast.get_docstring(node) and node.name not in inherited
    ]
    assert bare == []


def test_examples() -> None:
    """The examples in docstrings run, and print what they say."""
    shown = [_module(path) for path in SOURCES if ">>>" in path.read_text()]
    results = [doctest.testmod(importlib.import_module(name)) for name in shown]
    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0


def _loaded_after_import() -> set[str]:
    code = "import sys, optimus; print(' '.join(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


def test_lean_import() -> None:
    """``import optimus`` pulls in neither the host nor the screen nor a compiler."""
    loaded = _loaded_after_import()
    assert loaded & {"transformers", "accelerate", "rich", "safetensors", "torch._dynamo"} == set()


def _seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def test_import_time() -> None:
    """``import optimus`` takes at most a fifth longer than ``import torch``: best of 5, in turn."""
    pairs = [(_seconds("import torch"), _seconds("import optimus")) for _ in range(5)]
    torch_alone, with_optimus = (min(side) for side in zip(*pairs, strict=True))
    assert with_optimus <= 1.2 * torch_alone
