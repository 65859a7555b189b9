"""Each line of the page of questions runs, and returns what the page says."""

from __future__ import annotations

import re
from typing import Any

import pandas as pd
import pytest
from support.pages import ROOT, blocks
from support.printed_tables import printed

PAGE = (ROOT / "docs" / "twelve_questions.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| \[(.*?)\]\(\S+\) \| `(.*)` \| (.*) \|$", PAGE, re.MULTILINE)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """A model and its text, as the page makes them."""
    made: dict[str, Any] = {}
    (block,) = blocks(PAGE, "python")
    exec(block.text, made)
    return made


def test_there_are_at_most_twelve() -> None:
    assert PAGE.count("\n| ") - 1 == len(ROWS)
    assert 11 <= len(ROWS) <= 12


@pytest.mark.parametrize(("line", "returned"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_a_line_returns_what_the_page_says(line: str, returned: str, names: dict[str, Any]) -> None:
    """A table prints it in a script, at 80 columns."""
    found = eval(line, names)
    columns = printed(found) if isinstance(found, pd.DataFrame) else set(dir(found))
    named = re.findall(r"`(\w+)`", returned)
    assert len(named) >= 1
    assert [name for name in named if name not in columns] == []
