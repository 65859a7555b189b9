"""Links of all pages and notebooks lead to files and headings that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.links import broken_links
from support.pages import PAGES, ROOT

CARD = ROOT / "tl_posdisent" / "demo" / "MODEL_CARD.md"
LINKING = [*PAGES, CARD, ROOT / "CHANGELOG.md", *sorted((ROOT / "examples").glob("*.ipynb"))]


@pytest.mark.parametrize("path", LINKING, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    assert not broken_links(path)
