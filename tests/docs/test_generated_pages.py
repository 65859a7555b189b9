"""Pages that scripts write are what their scripts write today."""

from __future__ import annotations

import pytest
from support.pages import ROOT

DOCS = ROOT / "docs"

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(DOCS))
    import llms

pytestmark = pytest.mark.tl4


def test_llms_txt() -> None:
    """Otherwise: python docs/llms.py"""
    assert llms.LLMS.read_text(encoding="utf-8") == llms.llms()
