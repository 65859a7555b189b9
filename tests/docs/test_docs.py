"""The documentation is complete and true: the support table is tried again, the API page names everything."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import pytest
from support import zoo
from support.pages import PAGES, ROOT
from support.public import public_names

import tl_posdisent

DOCS = ROOT / "docs"
_spec = importlib.util.spec_from_file_location("support_table", DOCS / "support_table.py")
assert _spec is not None
assert _spec.loader is not None
support_table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(support_table)

WRITTEN = support_table.from_markdown(support_table.TABLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("kind", "name"), zoo.cases())
@pytest.mark.usefixtures("unchecked")
def test_support_table_says_what_is(kind: str, name: str, shared_model: Callable[[str, str], Any]) -> None:
    code = f"{kind[0].upper()}{zoo.TL_MAJOR}"
    tried = support_table.try_tools(shared_model(kind, name))
    assert WRITTEN[name, code] == tried, "write the table anew: python docs/support_table.py"


def test_support_table_has_these_rows_and_no_others() -> None:
    installed = {case for case in WRITTEN if case[1] in support_table.codes()}
    assert installed == set(support_table.cases())
    assert {code for _, code in WRITTEN} == set(support_table.CLASSES)
    text = support_table.TABLE.read_text(encoding="utf-8")
    assert support_table.to_markdown(WRITTEN) == text


def test_api_page_has_every_public_name_once() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^\.\. auto(?:function|class|data):: (?:[\w.]+\.)?(\w+)$", page, re.MULTILINE)
    assert sorted(named) == sorted(public_names())


def test_the_documentation_names_no_functions_that_are_gone() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"~tl_posdisent\.(\w+)", text):
            assert hasattr(tl_posdisent, name), f"{page.name} names {name}"
