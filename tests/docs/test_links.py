"""Links of all pages and notebooks lead to files and headings that exist; no page and no figure is left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.links import broken_links, links_of
from support.pages import PAGES, ROOT

DOCS = ROOT / "docs"
CARD = ROOT / "tl_posdisent" / "demo" / "MODEL_CARD.md"
LINKING = [*PAGES, CARD, ROOT / "CHANGELOG.md", *sorted((ROOT / "examples").glob("*.ipynb"))]


@pytest.mark.parametrize("path", LINKING, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    assert not broken_links(path)


def test_every_page_and_figure_is_reached() -> None:
    """From the landing page, by toctrees; figures from some page."""
    index = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("index.md", "api.md"))
    pages = {path.relative_to(DOCS).as_posix() for path in PAGES if path.is_relative_to(DOCS)}
    assert pages - set(links_of(index)) == {"index.md", "support_table.md", "newest.md"}
    used = {Path(link).name for page in PAGES for link in links_of(page.read_text(encoding="utf-8"))}
    assert {path.name for path in (DOCS / "figures").glob("*.svg")} <= used
    for path in (DOCS / "figures").glob("*.svg"):
        assert path.stat().st_size < 150_000, f"{path.name} is too heavy for a page"
