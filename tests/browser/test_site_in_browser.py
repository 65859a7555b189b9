"""The site that `make docs` built: its search and its side bar lead to everything, and tables scroll in boxes."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from support.pages import DOCS, ROOT
from support.public import public_names

SITE = ROOT / "docs" / "_build" / "html"
INDEX = SITE / "searchindex.js"
SOURCES = [*DOCS, *(ROOT / "docs").glob("*.py"), *(ROOT / "tl_posdisent").rglob("__init__.pyi")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not INDEX.exists() or INDEX.stat().st_mtime < max(path.stat().st_mtime for path in SOURCES),
        reason="no site, or one of other sources: make docs",
    ),
]


@functools.cache
def search_index() -> dict[str, Any]:
    text = INDEX.read_text(encoding="utf-8")
    return json.loads(text[text.index("(") + 1 : text.rindex(")")])


def test_the_search_finds_every_public_name() -> None:
    """As an object, under the page of its entry."""
    found = {f"{prefix}.{entry[4]}" for prefix, entries in search_index()["objects"].items() for entry in entries}
    names = {path.rpartition(".")[2] for path in found}
    assert sorted(set(public_names()) - names) == []


def test_the_side_bar_leads_to_every_page() -> None:
    page = (SITE / "index.html").read_text(encoding="utf-8")
    bar = page[page.index('class="sidebar-tree"') : page.index('class="main"')]
    pages = {name for name in search_index()["docnames"] if name != "index"}
    assert pages - set(re.findall(r'href="([\w/]+)\.html"', bar)) == set()


def test_the_page_of_reports_leads_to_one(opened: Callable[..., Any]) -> None:
    page = opened(SITE / "report.html", may_fail=True).page
    page.get_by_role("link", name="report of the demo model").click()
    assert page.get_by_role("heading", level=1).inner_text().startswith("Where and what in")


@pytest.mark.parametrize("width", [390, 1300])
@pytest.mark.parametrize("name", ["results", "support"])
def test_pages_with_tables_are_no_wider_than_the_window(opened: Callable[..., Any], name: str, width: int) -> None:
    page = opened(SITE / f"{name}.html", width=width, may_fail=True).page
    assert page.locator(".table-wrapper").count() > 0
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_a_wide_table_scrolls_in_a_box_of_its_own(opened: Callable[..., Any]) -> None:
    """On a phone that is turned: its header and its first column stay where they are."""
    page = opened(SITE / "deposit.html", width=390, may_fail=True).page
    page.set_viewport_size({"width": 390, "height": 300})
    box = page.locator(".table-wrapper").first
    assert box.evaluate("(e) => e.scrollWidth > e.clientWidth + 50 && e.scrollHeight > e.clientHeight")
    top, left = "(e) => e.getBoundingClientRect().top", "(e) => e.getBoundingClientRect().left"
    header, first = box.locator("thead th").nth(3), box.locator("tbody td").first
    before = header.evaluate(top), first.evaluate(left)
    box.evaluate("(e) => e.scrollTo(300, 400)")
    assert (header.evaluate(top), first.evaluate(left)) == before
