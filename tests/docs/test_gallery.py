"""The gallery is what its script writes, and shows figures by calls that exist."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest
from support.pages import ROOT
from support.public import public_names

pytestmark = pytest.mark.tl4

DOCS = ROOT / "docs"

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(DOCS / "figures"))
    import gallery


def test_the_page_is_what_the_script_writes() -> None:
    assert (DOCS / "gallery.md").read_text(encoding="utf-8") == gallery.page()


def calls(node: ast.AST) -> list[ast.Call]:
    return [x for x in ast.walk(node) if isinstance(x, ast.Call)]


@pytest.mark.parametrize("picture", gallery.PICTURES, ids=lambda picture: picture.title)
def test_calls_have_arguments_that_their_functions_take(picture: Any) -> None:
    """Of public functions; methods of what they return are tried where they are documented."""
    public, known = {name.split(".")[-1]: x for name, x in public_names().items()}, 0
    for call in calls(ast.parse(picture.call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
        if name in public:
            inspect.signature(public[name]).bind(
                *(object() for _ in call.args), **{str(x.arg): object() for x in call.keywords}
            )
            known += 1
    assert known, picture.call
