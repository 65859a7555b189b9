"""The documentation is complete and true: the support table is tried again, the API page names everything."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support.pages import ROOT
from support.public import public_names
from support.zoo_configs import MECHANISMS

DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import api_pages  # noqa: E402
import support_table  # noqa: E402

pytestmark = pytest.mark.tl4

WRITTEN = support_table.from_markdown(support_table.written())


def _row(name: str, code: str) -> Any:
    return pytest.param((name, code), marks=[] if code == "B4" else pytest.mark.slow, id=f"{name}-{code}")


def _again(name: str, code: str) -> bool:
    """Say whether a row of TransformerLens 4 is that of version 3, of an architecture that adds no mechanism."""
    return code == "B4" and name not in MECHANISMS and WRITTEN[name, code] == WRITTEN.get((name, "B3"))


@pytest.mark.parametrize("row", [_row(*case) for case in support_table.cases() if not _again(*case)])
@pytest.mark.usefixtures("unchecked")
def test_support_table_says_what_is(row: tuple[str, str], shared_model: Callable[[str, str], Any]) -> None:
    name, code = row
    tried = support_table.try_tools(shared_model(support_table.CLASSES[code], name))
    assert WRITTEN[row] == tried, "write the table anew: python docs/support_table.py"


def test_support_table_has_these_rows_and_no_others() -> None:
    installed = {case for case in WRITTEN if case[1] in support_table.codes()}
    assert installed == set(support_table.cases())
    assert {code for _, code in WRITTEN} == set(support_table.CLASSES)
    assert support_table.to_markdown(WRITTEN) == support_table.written()


def test_api_pages_have_every_public_name_once() -> None:
    pages = [path.read_text(encoding="utf-8") for path in sorted((DOCS / "api").glob("*.md"))]
    expanded = "\n".join(map(api_pages.expanded, pages))
    entries = re.findall(r"^\.\. auto(?:function|class|data):: (tl_posdisent\.[\w.]+)$", expanded, re.MULTILINE)
    assert sorted(path.rpartition(".")[2] for path in entries) == sorted(public_names())


def test_names_are_documented_where_they_are_imported_from() -> None:
    for path, module in api_pages.public_names().items():
        namespace, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(namespace), name)
        assert value is getattr(importlib.import_module(f"tl_posdisent.{module}"), name)


def test_names_in_text_become_links_to_their_entries() -> None:
    text = (DOCS / "patching.md").read_text(encoding="utf-8")
    site = api_pages.expanded(text)
    for name in ("position_patching", "hooks.patch_vectors"):
        assert f"`{name}`" in text
        assert f"{{py:obj}}`{name} <tl_posdisent.{name}>`" in site
    code = re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)
    assert re.findall(r"^```.*?^```$", site, re.MULTILINE | re.DOTALL) == code
