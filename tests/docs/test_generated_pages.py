"""Pages and tables that scripts write are what their scripts write today."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from support.pages import ROOT

DOCS = ROOT / "docs"

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(DOCS / "figures"))
    patch.syspath_prepend(str(DOCS))
    import deposit_96_heads
    import gallery
    import one_page

pytestmark = pytest.mark.tl4


def test_the_api_sheet_and_llms_txt() -> None:
    """Otherwise: python docs/one_page.py"""
    assert one_page.SHEET.read_text(encoding="utf-8") == one_page.sheet()
    assert one_page.LLMS.read_text(encoding="utf-8") == one_page.llms()


def test_the_gallery() -> None:
    assert (DOCS / "gallery.md").read_text(encoding="utf-8") == gallery.page()


def test_the_table_of_the_deposit() -> None:
    table: Any = deposit_96_heads.summary(deposit_96_heads.finished())
    assert deposit_96_heads.markdown(table) in (DOCS / "deposit.md").read_text(encoding="utf-8")


def test_readme_counts_the_models_with_one_necessary_head() -> None:
    table: Any = deposit_96_heads.finished().query("size == 'medium' and encoding in ('rope', 'sinusoidal_rope')")
    assert deposit_96_heads.one_necessary(table).sum() == 4
    said = f"Of {len(table)} rotary models with 96 heads, four have one head that matters"
    assert said in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def test_one_necessary_head_is_one() -> None:
    """Large, and alone."""
    table = pd.DataFrame({"mean_accuracy_drop": [0.2, 0.2, 0.08, 0.0], "mean_accuracy_second": [0.05, 0.06, 0.0, 0.0]})
    assert deposit_96_heads.one_necessary(table).tolist() == [True, False, False, False]
