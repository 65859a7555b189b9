"""Write docs/results.md, the claims of the two papers and the findings of this project, from the tables beside it:

python docs/findings/page.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from claims import CLAIMS_A, CLAIMS_B, FINDINGS, HEADINGS, OPENING, Claim, Finding, Line

HERE = Path(__file__).parent
PAGE = HERE.parent / "results.md"
COLUMNS = {
    "SmolLM2, speeches": "smollm2_speeches",
    "SmolLM2, WikiText": "smollm2_wikitext",
    "SmolLM2, demo text": "smollm2_demo",
    "Gemma 3, speeches": "gemma3-270m_speeches",
    "demo model": "demo_length",
    "story model": "story_length",
}
MISSING = "–"
SYNTHETIC = HERE / "tables" / "synthetic.csv"


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
    found: dict[str, dict[tuple[str, str, int], Number]] = {}
    for column, name in COLUMNS.items():
        path = HERE / "tables" / f"{name}.csv"
        if instead is not None and (instead / path.name).exists():
            path = instead / path.name
        rows = (
            pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["study", "name", "value", "error", "length"])
        )
        keys = zip(rows["study"], rows["name"], rows["length"], strict=True)
        found[column] = dict(zip(keys, map(Number, rows["value"], rows["error"]), strict=True))
    return found


def table(header: list[str], rows: list[list[str]]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in [header, *rows])
    return "\n".join([head, "|---" * len(header) + "|", *body])


def numbers(lines: list[Line], known: dict[str, dict[tuple[str, str, int], Number]]) -> str:
    """A table with a row for each number that is measured, and the columns in which any is."""
    shown = [column for column in COLUMNS if any(tuple(key) in known[column] for _, *key in lines)]
    body = [[label, *(str(known[column].get(tuple(key), MISSING)) for column in shown)] for label, *key in lines]
    return table(["measured", *shown], body)


def of_claims(claims: list[Claim], known: dict[str, dict[tuple[str, str, int], Number]]) -> list[str]:
    parts = []
    for n, x in enumerate(claims, start=1):
        parts += [f"**{n}. {x.claim}.** Paper: {x.paper}.", numbers(x.lines, known), f"*{x.status}.* {x.why}"]
    return parts


def of_findings(findings: list[Finding], known: dict[str, dict[tuple[str, str, int], Number]]) -> list[str]:
    parts = []
    for n, x in enumerate(findings, start=1):
        parts += [
            f"**{n}. {x.finding.removeprefix('**')}.",
            numbers(x.lines, known),
            f"*Attempt to refute it.* {x.attack}",
        ]
    return parts


def page(instead: Path | None = None) -> str:
    """The whole page; the tables of a folder take the place of ours."""
    known = tables(instead)
    synthetic = table(
        ["claim", "paper", "here", "status"],
        [[x.claim, x.paper, filled(x.here), f"**{x.status}.** {filled(x.why)}"] for x in CLAIMS_B],
    )
    parts = [OPENING, *of_claims(CLAIMS_A, known), HEADINGS["B"], synthetic]
    return "\n\n".join([*parts, HEADINGS["findings"], *of_findings(FINDINGS, known)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
