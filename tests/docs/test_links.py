"""Links of all pages and notebooks lead to files and headings that exist; no page and no figure is left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.links import anchors_of, broken_links, links_of
from support.pages import PAGES, ROOT

DOCS = ROOT / "docs"
CARD = ROOT / "tl_posdisent" / "demo" / "MODEL_CARD.md"
LINKING = [*PAGES, CARD, ROOT / "CHANGELOG.md", *sorted((ROOT / "examples").glob("*.ipynb"))]


@pytest.mark.parametrize("path", LINKING, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    assert not broken_links(path)


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `title` here\n\n## A title here\n\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    good = "[a](other.md) [b\nb](other.md#a-title-here) ![c](other.md#a-title-here-1) [d](#top) [e](https://a.org/b)\n"
    page.write_text(
        f"# Top\n\n{good}`[x](code.md)`\n\n```py\n[x](code.md)\n```\n\n```{{toctree}}\n:hidden:\n\nother\n```\n"
    )
    assert len(links_of(page.read_text())) == 6
    assert not broken_links(page)
    for bad in ("[x](gone.md)", "![x](gone.svg)", "[x](other.md#no-heading)", "[x](#bottom)", "[x](http://a.org)",
                "```{image} gone.svg\n```", "```{image} other.md\n```\n[x](gone.md)\n```py\n```",
                    "```{toctree}\ngone\n```", "<!-- notebook: gone.ipynb -->"):  # fmt: skip
        page.write_text(f"# Top\n\n{good}\n{bad}\n")
        assert len(broken_links(page)) == 1, bad
    assert anchors_of("## What *is* this? (a, b)\n") == {"what-is-this-a-b"}


def test_every_page_and_figure_is_reached() -> None:
    """From the landing page, by toctrees; figures from some page."""
    index = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("index.md", "api.md"))
    pages = {path.relative_to(DOCS).as_posix() for path in PAGES if path.is_relative_to(DOCS)}
    assert pages - set(links_of(index)) == {"index.md", "support_table.md"}
    used = {Path(link).name for page in PAGES for link in links_of(page.read_text(encoding="utf-8"))}
    assert {path.name for path in (DOCS / "figures").glob("*.svg")} <= used
    for path in (DOCS / "figures").glob("*.svg"):
        assert path.stat().st_size < 150_000, f"{path.name} is too heavy for a page"
