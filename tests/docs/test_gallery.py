"""The gallery is what its script writes, and shows figures by calls that exist."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest
from support.pages import ROOT
from support.public import public_names

DOCS = ROOT / "docs"
FIGURES = DOCS / "figures"


with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(FIGURES))
    import gallery


def test_the_page_is_what_the_script_writes() -> None:
    assert (DOCS / "gallery.md").read_text(encoding="utf-8") == gallery.page()


def test_pictures_exist_and_every_figure_that_explains_a_tool_is_shown() -> None:
    shown = [picture.file for picture in gallery.PICTURES]
    assert [name for name in shown if not (FIGURES / name).is_file()] == []
    assert len(set(shown)) == len(shown)
    again = {  # the same kind of figure, of another model or setting
        *(f"smollm2_{name}.svg" for name in ("heads", "by_layer", "layers", "sufficiency")),
        *(f"{name}.svg" for name in ("deposit", "deposit_96_heads", "downstream", "house", "language_dynamics")),
        *(f"{name}.svg" for name in ("output_projection", "replaced_heads", "how_much_text")),
    }
    assert {path.name for path in FIGURES.glob("*.svg")} - again == {x for x in shown if x.endswith(".svg")}


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
