"""Write docs/results.md, the claims of the two papers and the findings of this project, from the tables
of studies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from shared.claims import CLAIMS_A, CLAIMS_B, FINDINGS, HEADINGS, OPENING, Claim, Finding
from shared.rows import TABLES

PAGE = Path(__file__).parents[1] / "results.md"
COLUMNS = {
    "speeches": "smollm2_speeches",
    "WikiText": "smollm2_wikitext",
    "demo": "smollm2_demo",
    "Gemma": "gemma3-270m_speeches",
    "demo model": "demo_length",
    "story model": "story_length",
}
MISSING = "–"
SYNTHETIC = TABLES / "synthetic.csv"


class Number(NamedTuple):
    value: float
    error: float

    def __str__(self) -> str:
        digits = 1 if abs(self.value) >= 10 else 3 if self.error < 0.005 or abs(self.value) < 0.05 else 2
        spread = "" if pd.isna(self.error) else f"±{self.error:.{digits}f}"
        return f"{self.value:.{digits}f}{spread}".replace("-", "−")


def filled(text: str) -> str:
    """A text with the numbers of small models in place of ``{study: row}``."""
    rows = pd.read_csv(SYNTHETIC).set_index(["study", "name"])

    def number(place: re.Match[str]) -> str:
        row = rows.loc[(place[1], place[2])]
        return str(Number(row["value"], row["error"]))

    return re.sub(r"{(\w+): ([^}]*)}", number, text)


def tables(instead: Path | None = None) -> dict[str, dict[tuple[str, str, int], Number]]:
    """The numbers of each table, by study, row and length of the texts; those of a folder take the place of ours."""
    by_column: dict[str, dict[tuple[str, str, int], Number]] = {}
    for column, name in COLUMNS.items():
        path = TABLES / f"{name}.csv"
        if instead is not None and (instead / path.name).exists():
            path = instead / path.name
        rows = (
            pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["study", "name", "value", "error", "length"])
        )
        keys = zip(rows["study"], rows["name"], rows["length"], strict=True)
        by_column[column] = dict(zip(keys, map(Number, rows["value"], rows["error"]), strict=True))
    return by_column


def markdown(header: list[str], rows: list[list[str]]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in [header, *rows])
    return "\n".join([head, "|---" * len(header) + "|", *body])


def lines(part: str, number: int) -> pd.DataFrame:
    """The rows of ``tables/results_page.csv`` that a claim or a finding rests on."""
    table = pd.read_csv(TABLES / "results_page.csv")
    return table[(table["part"] == part) & (table["number"] == number)]


def numbers(rows: pd.DataFrame, known: dict[str, dict[tuple[str, str, int], Number]]) -> str:
    """A table with a row for each number that is measured, and the columns in which any is."""
    keys = list(rows[["study", "row", "length"]].itertuples(index=False, name=None))
    shown = [column for column in COLUMNS if any(key in known[column] for key in keys)]
    body = [
        [label, *(str(known[column].get(key, MISSING)) for column in shown)]
        for label, key in zip(rows["measured"], keys, strict=True)
    ]
    return markdown(["measured", *shown], body)


def of_claims(claims: list[Claim], known: dict[str, dict[tuple[str, str, int], Number]]) -> list[str]:
    parts = []
    for n, x in enumerate(claims, start=1):
        parts += [f"**{n}. {x.claim}.** Paper: {x.paper}.", numbers(lines("A", n), known), f"*{x.status}.* {x.why}"]
    return parts


def of_findings(findings: list[Finding], known: dict[str, dict[tuple[str, str, int], Number]]) -> list[str]:
    parts = []
    for n, x in enumerate(findings, start=1):
        parts += [
            f"**{n}. {x.finding.removeprefix('**')}.",
            numbers(lines("findings", n), known),
            f"*Attempt to refute it.* {x.attack}",
        ]
    return parts


def page(instead: Path | None = None) -> str:
    """The whole page; the tables of a folder take the place of ours."""
    known = tables(instead)
    synthetic = markdown(
        ["claim", "paper", "here", "status"],
        [[x.claim, x.paper, filled(x.here), f"**{x.status}.** {filled(x.why)}"] for x in CLAIMS_B],
    )
    parts = [OPENING, *of_claims(CLAIMS_A, known), HEADINGS["B"], synthetic]
    return "\n\n".join([*parts, HEADINGS["findings"], *of_findings(FINDINGS, known)]) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
