"""The layers of the package: who imports whom, and which files alone meet other libraries and forward passes."""

from __future__ import annotations

import ast
import re

from support.imports import FOLDERS, PACKAGE, circle, grouped, import_graph, imported, parsed, sources

import tl_posdisent


def test_listed_folders_are_those_of_the_package() -> None:
    assert sorted(FOLDERS) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def test_imports_only_from_layers_below() -> None:
    wrong = []
    for name, path in sources().items():
        if name in ((), ("__main__",)):
            continue  # the public names of all layers, and the command line
        for other in imported(path):
            if not other:
                wrong.append(f"{'.'.join(name)} imports the package's root")
            elif FOLDERS.index(other[0]) > FOLDERS.index(name[0]):
                wrong.append(f"{'.'.join(name)} imports from a layer above: {'.'.join(other)}")
    assert not wrong


def test_experiments_and_interventions_meet_other_libraries_in_models_alone() -> None:
    """Elsewhere only the demo model and synthetic models are theirs."""
    pattern = re.compile(r"^\s*(?:from|import) (?:transformer_lens|transformers)\b", re.MULTILINE)
    folders = {name[0] for name, path in sources().items() if pattern.search(path.read_text(encoding="utf-8"))}
    assert folders == {"models", "synthetic", "demo"}


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


def found_by_name(tree: ast.AST) -> list[tuple[str, str]]:
    """Calls of ``public_name``, and the function in which each stands."""
    return [
        (function.name, ast.unparse(node))
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "public_name"
    ]


def test_only_results_that_draw_themselves_reach_above_their_layer() -> None:
    """By the name of a figure, in ``plot`` or ``show``."""
    found = [call for path in sources().values() for call in found_by_name(parsed(path))]
    assert len(found) >= 4
    for function, call in found:
        name = re.fullmatch(r"public_name\('viz', '(\w+)'\)", call)
        assert function in ("plot", "show")
        assert name
        assert name[1] in tl_posdisent.viz.__all__


_CUTS_IN = re.compile(
    r"register_(full_)?(forward|backward|module)_|\.add_(perma_)?hook\(|vars\(\w+\)\[.forward.\] =|_call_impl.\]"
)


def test_one_file_cuts_into_forward_passes() -> None:
    """Hooks and other ``forward``s are set in one place, which takes them off again whatever happens."""
    found = {str(path.relative_to(PACKAGE)) for path in sources().values() if _CUTS_IN.search(path.read_text("utf-8"))}
    assert found == {"models/running/forward_pass.py"}
