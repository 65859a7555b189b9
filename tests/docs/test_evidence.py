"""What a section says of the draws behind its tables agrees with the tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
from support.pages import DOCS, ROOT

_EVIDENCE = re.compile(r"^\*\*Evidence\.\*\* (.*?)\.$", re.MULTILINE | re.DOTALL)
_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_SPREAD = {"se", "error", "std"}  # columns with an interval


@dataclass(frozen=True)
class Section:
    """A heading, the fields of its line **Evidence.**, and the tables of ``docs/figures`` that its code reads."""

    page: str
    heading: str
    evidence: dict[str, str]
    tables: list[Path]


def sections(text: str, page: str = "") -> list[Section]:
    """The sections of a page that have such a line."""
    found, part, fenced = list[Section](), list[str](), False
    for line in [*text.splitlines(), "# end"]:
        fenced ^= line.startswith("```")
        if line.startswith("#") and not fenced:
            found += _section(page, "\n".join(part))
            part = []
        part.append(line)
    return found


def _section(page: str, text: str) -> list[Section]:
    line = _EVIDENCE.search(text)
    if not line:
        return []
    names = re.findall(r'"(docs/figures/[^"{}]+\.csv)"', text)
    for pattern in re.findall(r'f"(docs/figures/\{model\}/[^"{}]+\.csv)"', text):
        names += [pattern.replace("{model}", model) for model in ("smollm2", "gemma3")]
    fields = dict(re.findall(r"\*(\w+)\*: ([^;]+)", " ".join(line[1].split())))
    return [Section(page, text.partition("\n")[0].lstrip("# "), fields, [ROOT / name for name in names])]


def numbers(text: str) -> set[int]:
    """The whole numbers of a text, in figures or in words."""
    words = {_WORDS.index(word) for word in re.findall(r"[a-z]+", text.lower()) if word in _WORDS}
    return words | {int(digits) for digits in re.findall(r"(?<![\d./])\d+(?![\d/]|\.\d)", text)}


def problems(section: Section) -> list[str]:
    """Draws and intervals that a table has and the line does not state."""
    wrong = []
    for path in section.tables:
        table = pd.read_csv(path, keep_default_na=False)
        seeds = set(table.get("seed", ()))
        if len(seeds) > 1 and len(seeds) not in numbers(section.evidence["draws"]):
            wrong.append(f"{path.name} has {len(seeds)} draws")
        if _SPREAD & set(table) and section.evidence["interval"].startswith("none"):
            wrong.append(f"{path.name} has an interval: {_SPREAD & set(table)}")
    return wrong


STATED = [each for path in DOCS for each in sections(path.read_text(encoding="utf-8"), path.name)]


@pytest.mark.parametrize("section", STATED, ids=lambda each: f"{each.page}: {each.heading}")
def test_stated_draws_and_intervals_are_those_of_the_tables(section: Section) -> None:
    assert problems(section) == []


@pytest.mark.parametrize(
    ("table", "old", "said"),
    [("trained_and_random", "five", "has 5 draws"), ("smollm2/idle", "standard error", "has an interval")],
)
def test_a_wrong_statement_is_found(table: str, old: str, said: str) -> None:
    page = f"""## Heads
```python
# Read it.
pd.read_csv("docs/figures/{table}.csv")
```

**Evidence.** *models*: one; *texts*: six; *draws*: five copies; *interval*: standard error.
"""
    (right,), (wrong,) = sections(page), sections(page.replace(old, "none"))
    assert problems(right) == []
    assert said in " ".join(problems(wrong))
