"""The rules of the house: floors, circles, names, files of one subject, and nothing that a library should not do."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

import pytest
from support.imports import PACKAGE, ROOMS, circle, grouped, import_graph, imported, parsed, sources

import tl_posdisent


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


def test_experiments_and_interventions_meet_other_libraries_in_models_alone() -> None:
    """Elsewhere only the demo model and synthetic models are theirs, and a command lists the names of their models."""
    pattern = re.compile(r"^\s*(?:from|import) (?:transformer_lens|transformers)\b", re.MULTILINE)
    rooms = {name[0] for name, path in sources().items() if pattern.search(path.read_text(encoding="utf-8"))}
    assert rooms == {"models", "synthetic", "demo", "cli"}


def test_no_file_and_no_folder_imports_itself_by_way_of_others() -> None:
    graph = import_graph()
    for imports in (graph, *(grouped(graph, depth) for depth in (1, 2, 3))):
        assert circle(imports) == []


_IMPORTING = ("import_module", "__import__", "resolve_name")


def imported_by_strings(tree: ast.AST) -> list[str]:
    """Calls that import what a string names, and looks into ``sys.modules``."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in _IMPORTING:
            found.append(ast.unparse(node))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.modules":
            found.append("sys.modules")
    return found


def test_no_module_is_imported_by_a_string() -> None:
    """But for names of TransformerLens that are in one module in one version and in another in the next."""
    found = {str(path.relative_to(PACKAGE)): imported_by_strings(parsed(path)) for path in sources().values()}
    assert {path: x for path, x in found.items() if x} == {"models/loading/load.py": ["resolve_name(place)"]}
    source = (PACKAGE / "models" / "loading" / "load.py").read_text(encoding="utf-8")
    assert not re.search(r"""["']tl_posdisent\.""", source)


@pytest.mark.parametrize(
    "source",
    ["importlib.import_module('a')", "__import__('a')", "pkgutil.resolve_name('a:b')", "sys.modules['a']",
     "sys.modules.get('a')"],
)  # fmt: skip
def test_imports_by_strings_are_found(source: str) -> None:
    assert imported_by_strings(ast.parse(source))


def found_by_name(tree: ast.AST) -> list[tuple[str, str]]:
    """Calls of ``public_name``, and the function in which each stands."""
    return [
        (function.name, ast.unparse(node))
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "public_name"
    ]


def test_only_results_that_draw_themselves_reach_above_their_floor() -> None:
    """By the name of a figure, in ``plot`` or ``show``."""
    found = [call for path in sources().values() for call in found_by_name(parsed(path))]
    assert len(found) >= 4
    for function, call in found:
        name = re.fullmatch(r"public_name\('viz', '(\w+)'\)", call)
        assert function in ("plot", "show")
        assert name
        assert name[1] in tl_posdisent.viz.__all__


def test_files_are_one_chapter_and_say_which() -> None:
    for path in sources().values():
        source = path.read_text(encoding="utf-8")
        assert source.count("\n") <= 600, f"{path.name}: one subject, or two?"
        assert ast.get_docstring(parsed(path)), f"{path}: no module docstring"


def test_library_does_not_print_or_show() -> None:
    for path in sources().values():
        called = [ast.unparse(node.func) for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
        assert not [x for x in called if x in ("print", "torch.load") or x.endswith(".show")], path


_MANY = 5  # kinds of errors that are as good as all


def groups_of_errors() -> dict[str, str]:
    """Names in the package that stand for a tuple of errors, and that tuple as it is written."""
    found = {}
    for path in sources().values():
        for node in parsed(path).body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Tuple)
                and "Error" in ast.unparse(node.value)
            ):
                found[ast.unparse(node.targets[0])] = ast.unparse(node.value)
    return found


def swallowed(tree: ast.AST, groups: Mapping[str, str]) -> list[int]:
    """Lines of handlers that catch all errors, or nearly all, and neither raise one nor use what they caught."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "BaseException"
            caught = ", ".join(groups.get(name, name) for name in re.findall(r"\w+", caught))
            broad = re.search(r"\b(Base)?Exception\b", caught) or caught.count("Error") >= _MANY
            inside = [x for statement in node.body for x in ast.walk(statement)]
            used = any(isinstance(x, ast.Name) and x.id == node.name for x in inside)
            if broad and not used and not any(isinstance(x, ast.Raise) for x in inside):
                found.append(node.lineno)
        if isinstance(node, ast.Call) and re.match(r"(\w+\.)?suppress\(.*\b(Base)?Exception\b", ast.unparse(node)):
            found.append(node.lineno)
    return found


_CUTS_IN = re.compile(
    r"register_(full_)?(forward|backward|module)_|\.add_(perma_)?hook\(|vars\(\w+\)\[.forward.\] =|_call_impl.\]"
)


def test_one_file_cuts_into_forward_passes() -> None:
    """Hooks and other ``forward``s are set in one place, which takes them off again whatever happens."""
    found = {str(path.relative_to(PACKAGE)) for path in sources().values() if _CUTS_IN.search(path.read_text("utf-8"))}
    assert found == {"models/reading/forward_pass.py"}


_FALLS_BACK = {
    "models/partial_forward.py": 1,  # a full pass says whether the model is to blame
    "models/kv_cache.py": 2,  # a model that takes no cache
}


def test_no_error_is_swallowed() -> None:
    """``except Exception`` hides a defect: whoever catches says what, or raises again. What falls back is listed."""
    groups = groups_of_errors()
    found = {str(path.relative_to(PACKAGE)): len(swallowed(parsed(path), groups)) for path in sources().values()}
    assert {path: n for path, n in found.items() if n} == _FALLS_BACK


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ("except Exception as error: pass", True),
        ("except Exception: pass", True),
        ("except: pass", True),
        ("except (OSError, Exception): x = 1", True),
        ("except MANY: x = 1", True),
        ("except MANY as error: x = 1", True),
        ("except Exception as error: x = str(error)", False),
        ("except Exception: raise", False),
        ("except MANY as error: raise ValueError from error", False),
        ("except ValueError: pass", False),
        ("finally:\n  with contextlib.suppress(Exception): g()", True),
        ("finally:\n  with suppress(KeyError): g()", False),
    ],
)
def test_swallowed_errors_are_found(body: str, wrong: bool) -> None:
    groups = {"MANY": "(ValueError, RuntimeError, TypeError, KeyError, AssertionError)"}
    assert bool(swallowed(ast.parse(f"try: f()\n{body}"), groups)) == wrong


def test_truth_values_are_told_from_numbers_in_one_place() -> None:
    found = [
        str(path.relative_to(PACKAGE))
        for path in sources().values()
        if path.name != "validation.py" and re.search(r"isinstance\([^()]*, bool\)", path.read_text(encoding="utf-8"))
    ]
    assert not found
