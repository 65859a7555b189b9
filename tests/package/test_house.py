"""The rules of the house: floors, circles, names, files of one subject, and nothing that a library should not do."""

from __future__ import annotations

import ast
import re

from support import mutants
from support.imports import PACKAGE, ROOMS, circle, grouped, import_graph, imported, parsed, sources


def test_rooms_are_the_folders_of_the_package() -> None:
    assert sorted(ROOMS) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def test_imports_only_from_floors_below() -> None:
    wrong = []
    for name, path in sources().items():
        if name == ():
            continue  # the roof: it gathers the public names of all floors
        for other in imported(path):
            if not other:
                wrong.append(f"{'.'.join(name)} imports the package's root")
            elif ROOMS.index(other[0]) > ROOMS.index(name[0]):
                wrong.append(f"{'.'.join(name)} imports from a floor above: {'.'.join(other)}")
    assert not wrong


def test_no_file_and_no_folder_imports_itself_by_way_of_others() -> None:
    graph = import_graph()
    for imports in (graph, *(grouped(graph, depth) for depth in (1, 2, 3))):
        assert circle(imports) == []


def test_no_module_is_imported_by_a_string() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sources().values()
        for node in ast.walk(parsed(path))
        if (isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"))
        or (isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.modules")
    ]
    assert not found


def test_files_are_one_chapter_and_say_which() -> None:
    for path in sources().values():
        source = path.read_text(encoding="utf-8")
        assert source.count("\n") <= 600, f"{path.name}: one subject, or two?"
        assert ast.get_docstring(parsed(path)), f"{path}: no module docstring"


def test_library_does_not_print_or_show() -> None:
    for path in sources().values():
        called = [ast.unparse(node.func) for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
        assert not [x for x in called if x in ("print", "torch.load") or x.endswith(".show")], path


def test_no_error_is_swallowed() -> None:
    """``except Exception`` hides a defect: whoever catches says what, or raises again."""
    for path in sources().values():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else "everything"
                if re.search(r"\b(Base)?Exception\b|everything", caught):
                    raises = any(isinstance(x, ast.Raise) for x in ast.walk(node)) or "error" in (node.name or "")
                    assert raises, f"{path.relative_to(PACKAGE)}:{node.lineno} catches {caught} and goes on"


def test_truth_values_are_told_from_numbers_in_one_place() -> None:
    found = [
        str(path.relative_to(PACKAGE))
        for path in sources().values()
        if path.name != "validation.py" and re.search(r"isinstance\([^()]*, bool\)", path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_mutants_are_tried_by_tests_that_exist() -> None:
    paths = {path for stem in mutants.all_files() for path in mutants.tests_of(stem)}
    assert not [path for path in paths if not (mutants.ROOT / path).exists()]


def test_test_files_have_names_of_their_own() -> None:
    """pytest's default import mode takes a second file of one name for the first, and stops."""
    names = [path.name for path in (mutants.ROOT / "tests").rglob("test_*.py")]
    assert not {name for name in names if names.count(name) > 1}
