"""A page that concludes says what it rests on: models, texts, draws, an interval, and of how many a maximum is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
from support.pages import DOCS, ROOT

FIELDS = ("models", "texts", "draws", "interval", "among")
_EVIDENCE = re.compile(r"^\*\*Evidence\.\*\* (.*?)\.$", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"\*(\w+)\*: ([^;]+)")
_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_VALUES = {word: n for n, word in enumerate(_WORDS)}
_EXTREME = re.compile(r"\b(largest|smallest|lowest|highest|greatest|at most|most(?! of))\b")
_SPREAD = {"se", "error", "std", "added_loss_se", "alone_se", "back_se"}  # columns with an interval


@dataclass(frozen=True)
class Section:
    """A heading, its text without fenced blocks, and the tables of ``docs/figures`` that its code reads."""

    page: str
    heading: str
    prose: str
    tables: list[Path]

    @property
    def results(self) -> str:
        """The paragraphs (and lists) behind **Result.** and **Control.**, up to the next bold word of that kind."""
        return "\n".join(re.findall(r"\*\*(?:Result|Control)\.\*\*.*?(?=\n\n\*\*[A-Z]|\Z)", self.prose, re.DOTALL))

    @property
    def evidence(self) -> dict[str, str]:
        """The fields of the line **Evidence.**; none without such a line."""
        found = _EVIDENCE.search(self.prose)
        return dict(_FIELD.findall(" ".join(found[1].split()))) if found else {}


def sections(text: str, page: str = "") -> list[Section]:
    """The sections of a page that conclude something."""
    found, heading, lines, fenced = [], "", [], False
    for line in [*text.splitlines(), "# end"]:
        fenced ^= line.startswith("```")
        if line.startswith("#") and not fenced:
            found.append(_section(page, heading, "\n".join(lines)))
            heading, lines = line.lstrip("# "), []
        else:
            lines.append(line)
    return [each for each in found if "**Result.**" in each.prose]


def _section(page: str, heading: str, text: str) -> Section:
    names = re.findall(r'"(docs/figures/[^"{}]+\.csv)"', text)
    for pattern in re.findall(r'f"(docs/figures/\{model\}/[^"{}]+\.csv)"', text):
        names += [pattern.replace("{model}", model) for model in ("smollm2", "gemma3")]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return Section(page, heading, prose, [ROOT / name for name in names])


def numbers(text: str) -> set[int]:
    """The whole numbers of a text, in figures or in words."""
    words = {_VALUES[word] for word in re.findall(r"[a-z]+", text.lower()) if word in _VALUES}
    return words | {int(digits) for digits in re.findall(r"(?<![\d./])\d+(?![\d/]|\.\d)", text)}


def problems(section: Section) -> list[str]:
    """What the line of evidence lacks."""
    fields, wrong = section.evidence, []
    if tuple(fields) not in (FIELDS[:4], FIELDS):
        return [
            f"needs a line **Evidence.** with the fields {', '.join(FIELDS)} (the last for maxima), has {[*fields]}"
        ]
    drawn, interval = fields["draws"], fields["interval"]
    if not drawn.startswith("none") and not numbers(drawn):
        wrong.append("draws: none, or how many")
    if not fields["texts"].startswith("none") and not numbers(fields["texts"]):
        wrong.append("texts: none, or how many")
    if interval.startswith("none") and max(numbers(drawn), default=0) > 1:
        wrong.append("several draws have an interval or a deviation")
    extreme = _EXTREME.search(section.results)
    if extreme and not numbers(fields.get("among", "")):
        wrong.append(f"{extreme[0]!r}: among how many?")
    for path in section.tables:
        table = pd.read_csv(path, keep_default_na=False)
        seeds = set(table.get("seed", ()))
        if len(seeds) > 1 and len(seeds) not in numbers(drawn):
            wrong.append(f"{path.name} has {len(seeds)} draws")
        if _SPREAD & set(table) and interval.startswith("none"):
            wrong.append(f"{path.name} has an interval: {_SPREAD & set(table)}")
    return wrong


CONCLUDING = [each for path in DOCS for each in sections(path.read_text(encoding="utf-8"), path.name)]


@pytest.mark.parametrize("section", CONCLUDING, ids=lambda each: f"{each.page}: {each.heading}")
def test_what_a_section_concludes_rests_on_stated_evidence(section: Section) -> None:
    assert problems(section) == []


def test_there_are_sections_that_conclude() -> None:
    assert len(CONCLUDING) >= 50


SOUND = """## Heads
| head | loss |
**Result.** Head 3 has the largest effect.

**Evidence.** *models*: one; *texts*: six; *draws*: twelve orders; *interval*: standard
error; *among*: 40 heads.
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("twelve orders", "random orders", "how many"),
        ("six", "some", "how many"),
        ("standard\nerror", "none", "several draws"),
        ("; *among*: 40 heads", "", "among how many"),
        ("*interval*", "*range*", "needs a line"),
        ("**Evidence.**", "Evidence:", "needs a line"),
        ("| head | loss |", '```python\npd.read_csv("docs/figures/smollm2/sufficiency.csv")\n```', ""),
        ("twelve orders", "one order", ""),
    ],
)
def test_a_line_of_evidence_that_lacks_something_is_found(old: str, new: str, said: str) -> None:
    assert [problems(each) for each in sections(SOUND)] == [[]]
    (found,) = (problems(each) for each in sections(SOUND.replace(old, new)))
    assert bool(found) == bool(said)
    assert said in " ".join(found)


def test_a_table_with_draws_and_intervals_must_be_named_as_such() -> None:
    code = '```python\npd.read_csv("docs/figures/smollm2/sufficiency.csv")\n```'
    page = SOUND.replace("| head | loss |", code).replace("twelve orders", "one order")
    (found,) = (problems(each) for each in sections(page))
    assert "sufficiency.csv has 12 draws" in found
