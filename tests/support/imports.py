"""Who imports whom inside the package, read from the sources: for the tests of the layers and the picture of them."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import tl_posdisent

PACKAGE = Path(tl_posdisent.__file__).parent
FOLDERS = (
    *("utils", "additive", "rope", "models", "hooks", "experiments", "synthetic", "demo", "sweeps", "viz"),
    *("page", "cli"),
)
"""Folders of the package, each allowed to import from those before it."""

Module = tuple[str, ...]
"""A module's dotted name, split, relative to the package: ``("additive", "fit")``."""


@functools.cache
def sources() -> dict[Module, Path]:
    """Every Python file of the package by the name under which it is imported."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).with_suffix("").parts
        found[name[:-1] if name[-1] == "__init__" else name] = path
    return found


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a source file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> set[Module]:
    """Modules of the package that a file imports anywhere, also inside functions; ``()`` is the package's root.

    A name that is imported from a folder counts as an import of that folder, unless it is a module there.
    """
    known, here = sources(), path.relative_to(PACKAGE).parent.parts
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                module = ("tl_posdisent", *here[: len(here) - node.level + 1], *module)
            names = [(*module, alias.name) for alias in node.names]
        else:
            continue
        for name in names:
            if name[0] == "tl_posdisent":
                found.add(name[1:] if name[1:] in known else name[1:-1])
    return found


def import_graph() -> dict[Module, set[Module]]:
    """Each module and the modules that it imports; folders' ``__init__`` only gather names and are left out."""
    return {name: imported(path) for name, path in sources().items() if path.name != "__init__.py"}


def grouped(graph: Mapping[Module, Iterable[Module]], depth: int) -> dict[Module, set[Module]]:
    """The same between folders: modules are cut to ``depth`` names, imports within one folder are left out."""
    folders: dict[Module, set[Module]] = {}
    for name, others in graph.items():
        folder = name[:-1][:depth]
        targets = folders.setdefault(folder, set())
        targets |= {other[:-1][:depth] for other in others if other in graph}
        targets.discard(folder)
    return folders


def circle(graph: Mapping[Module, Iterable[Module]]) -> list[Module]:
    """Modules each of which imports the next, the last the first; empty if there are none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []
