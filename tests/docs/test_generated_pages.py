"""Pages and tables that scripts write are what their scripts write today."""

from __future__ import annotations

import pytest
from support.pages import ROOT

DOCS = ROOT / "docs"

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(DOCS / "figures"))
    patch.syspath_prepend(str(DOCS))
    import gallery
    import one_page

pytestmark = pytest.mark.tl4


def test_the_api_sheet_and_llms_txt() -> None:
    """Otherwise: python docs/one_page.py"""
    assert one_page.SHEET.read_text(encoding="utf-8") == one_page.sheet()
    assert one_page.LLMS.read_text(encoding="utf-8") == one_page.llms()


def test_the_gallery() -> None:
    assert (DOCS / "gallery.md").read_text(encoding="utf-8") == gallery.page()
