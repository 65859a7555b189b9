"""The API on one page and llms.txt are what the docstrings say today."""

from __future__ import annotations

import re
import sys

import pytest
from support.pages import ROOT
from support.public import public_names

DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import one_page  # noqa: E402

pytestmark = pytest.mark.tl4


def test_both_are_current() -> None:
    """Otherwise: python docs/one_page.py"""
    assert one_page.SHEET.read_text(encoding="utf-8") == one_page.sheet()
    assert one_page.LLMS.read_text(encoding="utf-8") == one_page.llms()


def test_every_public_name_is_there_once_with_a_sentence() -> None:
    for text in (one_page.sheet(), one_page.llms()):
        named = re.findall(r"^[*-] `(?:\w+\.)*(\w+)(?:\(.*?\))?`: \S", text, re.MULTILINE)
        assert sorted(named) == sorted(public_names())


def test_links_lead_to_pages() -> None:
    links = re.findall(r"\]\((\S+?)\)", one_page.LLMS.read_text(encoding="utf-8"))
    assert links
    assert all((DOCS / link).is_file() for link in links)


def test_a_call_has_its_arguments_and_defaults() -> None:
    assert (
        one_page.call_of("tl_posdisent.dummy_distance") == "dummy_distance(model, distance, *, layers=None, heads=None)"
    )
    assert one_page.call_of("tl_posdisent.hooks.applied") == "hooks.applied(model, hooks)"
