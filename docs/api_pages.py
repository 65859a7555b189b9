"""The API pages, made of the package's stubs and docstrings when the documentation is built.

A page says ``<!-- api: hooks -->`` where the public names defined in ``tl_posdisent.hooks`` (or several modules, with
spaces between) belong: a table with one line for each, then the entries. ``<!-- api-tables -->`` becomes the tables of
all pages of ``api/``. On every page, public names in text and tables become links to their entries.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import re
from pathlib import Path
from typing import Any

import tl_posdisent

PACKAGE = Path(tl_posdisent.__file__).parent
PAGES = Path(__file__).with_name("api")
_NAMES = re.compile(r"<!-- api: ([\w. ]+) -->")
_TABLES = "<!-- api-tables -->"
_BLOCKS = re.compile(r"(^```.*?^```$|^#.*?$)", re.MULTILINE | re.DOTALL)  # code, and headings
_CODE = re.compile(r"(?<!})`([\w.]+)`(?!\])")


@functools.cache
def public_names() -> dict[str, str]:
    """Every public name as users import it, in the shortest way, and the module that defines it."""
    found: dict[str, tuple[str, str]] = {}
    for stub in [PACKAGE / "__init__.pyi", *sorted(PACKAGE.glob("*/__init__.pyi"))]:
        namespace = "" if stub.parent == PACKAGE else f"{stub.parent.name}."
        for node in ast.parse(stub.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in node.names:
                    found.setdefault(name.name, (f"tl_posdisent.{namespace}{name.name}", namespace + node.module))
    return dict(found.values())


def names_of(modules: str) -> list[str]:
    """Public names defined in these modules or folders, module after module."""
    return [
        path
        for wanted in modules.split()
        for path, module in public_names().items()
        if f"{module}.".startswith(f"{wanted}.")
    ]


def summary(path: str) -> str:
    """The first sentence of the docstring; for a constant, of the string behind its assignment."""
    namespace, _, name = path.rpartition(".")
    value: Any = getattr(importlib.import_module(namespace), name)
    text = inspect.getdoc(value) if callable(value) else _described(public_names()[path], name)
    paragraph = " ".join((text or "").split("\n\n")[0].split())
    sentence = re.match(r".+?[.?](?=\s|$)", paragraph)
    return sentence[0] if sentence else paragraph


def _described(module: str, name: str) -> str:
    body = ast.parse(inspect.getsource(importlib.import_module(f"tl_posdisent.{module}"))).body
    for node, after in itertools.pairwise(body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(getattr(x, "id", None) == name for x in targets) and isinstance(after, ast.Expr):
            return str(ast.literal_eval(after.value))
    return ""


def table(paths: list[str]) -> str:
    """One line per name with its namespace, linked to its entry."""
    rows = [
        f"| {{py:obj}}`{path.removeprefix('tl_posdisent.')} <{path}>` | {_in_cell(summary(path))} |" for path in paths
    ]
    return "\n".join(["| name | what it is |", "| --- | --- |", *rows])


def _in_cell(text: str) -> str:
    return text.replace("|", "\\|")


def entry(path: str) -> str:
    """The Sphinx directive of one name."""
    namespace, _, name = path.rpartition(".")
    value: Any = getattr(importlib.import_module(namespace), name)
    if inspect.isclass(value):
        return f".. autoclass:: {path}\n   :members:\n   :exclude-members: __init__\n"
    return f".. auto{'function' if callable(value) else 'data'}:: {path}\n"


def expanded(page: str) -> str:
    """A page with its tables and entries."""

    def names(found: re.Match[str]) -> str:
        paths = names_of(found[1])
        return f"{table(paths)}\n\n```{{eval-rst}}\n" + "\n".join(map(entry, paths)) + "```\n"

    def tables() -> str:
        parts = []
        for path in sorted(PAGES.glob("*.md")):
            text = path.read_text(encoding="utf-8")
            title = text.splitlines()[0].removeprefix("# ")
            (modules,) = _NAMES.findall(text)
            parts.append(f"## [{title}](api/{path.name})\n\n{table(names_of(modules))}\n")
        return "\n".join(parts)

    whole = _NAMES.sub(names, page).replace(_TABLES, tables() if _TABLES in page else "")
    parts = _BLOCKS.split(whole)  # every other one is text
    parts[::2] = [_CODE.sub(_linked, text) for text in parts[::2]]
    return "".join(parts)


def _linked(code: re.Match[str]) -> str:
    """A public name as users import it, linked to its entry; other code stays."""
    path = f"tl_posdisent.{code[1]}"
    return f"{{py:obj}}`{code[1]} <{path}>`" if path in public_names() else code[0]


def insert(app: Any, name: str, content: list[str]) -> None:
    """For Sphinx's ``source-read``."""
    content[0] = expanded(content[0])
