"""Code blocks of a page of documentation, and whether they print the output shown."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text, and the text of a ``text`` block right behind it (what it prints)."""

    language: str
    text: str
    printed: str | None


def blocks(page: str, *languages: str) -> list[Block]:
    """Return the blocks of a page in some languages, in order."""
    found, kept = list(_FENCE.finditer(page)), []
    for block, after in itertools.zip_longest(found, found[1:]):
        follows = after is not None and after[1] == "text" and not page[block.end() : after.start()].strip()
        if block[1] in languages:
            kept.append(Block(block[1], block[2], after[2] if follows else None))
    return kept


def run_python(page: str) -> int:
    """Run a page's Python blocks in turn in one namespace, and compare what they print."""
    names: dict[str, object] = {"__name__": "__page__"}
    python = blocks(page, "python")
    for block in python:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.text, "<page>", "exec"), names)
        if block.printed is not None or printed.getvalue():
            assert_prints(printed.getvalue(), block.printed or "")
    return len(python)


def assert_prints(got: str, expected: str) -> None:
    """Assert that texts are equal, except for spaces and the last digit of decimal numbers."""
    words = got.split(), expected.split()
    same = len(words[0]) == len(words[1]) and all(_like(a, b) for a, b in zip(*words, strict=True))
    assert same, f"the page says\n{expected}\nbut now it is\n{got}"


def _like(got: str, expected: str) -> bool:
    if _NUMBER.sub("#", got) != _NUMBER.sub("#", expected):
        return False
    pairs = zip(_NUMBER.findall(got), _NUMBER.findall(expected), strict=True)
    return all(a == b or abs(float(a) - float(b)) <= _last_digit(b) for a, b in pairs)


def _last_digit(number: str) -> float:
    digits = number.split("e")[0].partition(".")[2]
    return 1.01 * 10.0 ** -len(digits) if digits else 0.0
