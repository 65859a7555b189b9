"""The rules of the house: floors, file sizes, examples, and nothing that a library should not do."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from support.public import public_names

import tl_posdisent

PACKAGE = Path(tl_posdisent.__file__).parent
FLOORS = [
    "utils",
    "additive",
    "rope",
    "models",
    "hooks",
    "experiments",
    "synthetic",
    "demo",
    "sweeps",
    "viz",
    "report",
    "cli",
]
TALKS = {"demo/train_demo.py", "demo/evaluate_demo.py"}  # programs, which may print


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def floor_of(parts: tuple[str, ...]) -> int | None:
    """The floor of a path or module inside the package; None for the roof, ``__init__`` and the like."""
    return FLOORS.index(parts[0]) if parts and parts[0] in FLOORS else None


def imported(path: Path) -> set[tuple[str, ...]]:
    """Modules of this package that a file imports anywhere, also inside functions, relative to the package."""
    here = path.relative_to(PACKAGE).parent.parts
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                module = ("tl_posdisent", *here[: len(here) - node.level + 1], *module)
            # `from . import cells` names modules, `from .cells import Cells` does not: both lie behind `module`.
            names = [(*module, alias.name) for alias in node.names]
        else:
            continue
        found |= {name[1:] for name in names if name[0] == "tl_posdisent"}
    return found


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_only_from_floors_below(path: Path) -> None:
    relative = path.relative_to(PACKAGE).with_suffix("").parts
    floor = floor_of(relative)
    if relative == ("__init__",):
        return  # the roof: it gathers the public names of all floors
    assert floor is not None, f"{name_of(path)} is on no floor; say which in FLOORS"
    for module in imported(path):
        other = floor_of(module)
        assert other is not None, f"{name_of(path)} imports from the roof: {'.'.join(module)}"
        assert other <= floor, f"{name_of(path)} imports from a floor above: {'.'.join(module)}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_file_is_short_and_says_what_it_is(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") <= 600, "one subject, or two?"
    assert ast.get_docstring(parsed(path)), "no module docstring"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_library_does_not_print_unpickle_or_show(path: Path) -> None:
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None)]
            assert "pickle" not in names, f"line {node.lineno}: pickle runs whatever a file tells it to"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called != "torch.load", f"line {node.lineno}: torch.load reads pickles; weights come as safetensors"
        assert not called.endswith(".show"), f"line {node.lineno}: pictures are returned, not shown"
        assert called != "print" or name_of(path) in TALKS, f"line {node.lineno}: the library does not print"


def test_public_names_are_sorted_out() -> None:
    public = list(tl_posdisent.__all__)
    assert len(set(public)) == len(public)
    missing = [name for name in public if not hasattr(tl_posdisent, name)]
    assert not missing


@pytest.mark.parametrize("name", sorted(public_names()))
def test_public_name_has_an_example(name: str) -> None:
    value = public_names()[name]
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return  # a constant or a type alias has no docstring of its own
    assert value.__doc__, "no docstring"
    assert ">>>" in value.__doc__, "no example"
