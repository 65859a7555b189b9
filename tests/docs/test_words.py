"""Pages and notebooks avoid the words of `support.wording`, and their headings are nouns."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.links import text_of
from support.wording import AVOIDED, PROSE, left_over, questions


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_no_avoided_phrase_is_left(path: Path) -> None:
    assert not list(left_over(path))


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_headings_are_no_questions(path: Path) -> None:
    assert not questions(text_of(path))


def test_avoided_phrases_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also across a line break; a question in a block of code is none of a page's headings."""
    monkeypatch.setattr("support.wording.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Which heads are missed?\n\nHooks that hand\non nothing.\n\n```py\n# what is it?\n```\n")
    assert {place.split(" → ")[0] for place in left_over(page)} == {"page.md:1: missed", "page.md:3: hand on"}
    assert questions(page.read_text()) == ["# Which heads are missed?"]
    assert all(instead for instead in AVOIDED.values())
