"""Pages and notebooks avoid the words of `support.wording`, and their headings are nouns."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.links import text_of
from support.wording import PROSE, left_over, questions


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_no_avoided_phrase_is_left(path: Path) -> None:
    assert not list(left_over(path))


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_headings_are_no_questions(path: Path) -> None:
    assert not questions(text_of(path))
