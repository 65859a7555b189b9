"""Write docs/results.md, the claims of the two papers and the findings of this project, from the tables beside it:

python docs/findings/page.py
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from claims import CLAIMS_A, CLAIMS_B, CLOSING, FINDINGS, OPENING, Claim, Finding

HERE = Path(__file__).parent
PAGE = HERE.parent / "results.md"
COLUMNS = {
    "SmolLM2, speeches": "smollm2_speeches",
    "SmolLM2, WikiText": "smollm2_wikitext",
    "SmolLM2, demo text": "smollm2_demo",
    "Gemma 3, speeches": "gemma3-270m_speeches",
}
MISSING = "–"


class Number(NamedTuple):
    value: float
    error: float

    def __str__(self) -> str:
        digits = 3 if self.error < 0.005 or abs(self.value) < 0.05 else 2
        spread = "" if pd.isna(self.error) else f" ± {self.error:.{digits}f}"
        return f"{self.value:.{digits}f}{spread}".replace("-", "−")


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
    for column, folder in {"SmolLM2, speeches": "smollm2", "Gemma 3, speeches": "gemma3"}.items():
        found[column] |= replaced_heads(HERE.parent / "figures" / folder / "replaced_heads.csv")
    return found


def replaced_heads(path: Path) -> dict[tuple[str, str, int], Number]:
    """The loss added by heads that are replaced together; the error of random orders is their standard deviation."""
    rows = pd.read_csv(path)
    rows = rows[rows["weights"] == "trained"]
    names = rows["replaced_by"] + ", " + rows["heads"].astype(str) + " heads, " + rows["order"]
    errors = rows["se"].where(rows["sd"].isna(), rows["sd"])
    numbers = map(Number, rows["added_loss"], errors)
    return {("replaced", name, 256): number for name, number in zip(names, numbers, strict=True)}


def cells(
    lines: Iterable[tuple[str, str, str, int]], known: dict[str, dict[tuple[str, str, int], Number]]
) -> list[str]:
    """One cell with what is measured, and one for each column with the numbers, a line for each."""
    lines = list(lines)
    numbers = [
        "<br>".join(str(known[column].get((study, name, length), MISSING)) for _, study, name, length in lines)
        for column in COLUMNS
    ]
    return ["<br>".join(label for label, *_ in lines), *numbers]


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def of_claims(claims: list[Claim], known: dict[str, dict[tuple[str, str, int], Number]]) -> str:
    header = ["claim", "paper", "measured", *COLUMNS, "status"]
    return table(header, [[x.claim, x.paper, *cells(x.lines, known), f"**{x.status}.** {x.why}"] for x in claims])


def of_findings(findings: list[Finding], known: dict[str, dict[tuple[str, str, int], Number]]) -> str:
    header = ["", "finding", "measured", *COLUMNS, "tried in order to refute it"]
    rows = [[str(n), x.finding, *cells(x.lines, known), x.attack] for n, x in enumerate(findings, start=1)]
    return table(header, rows)


def page(instead: Path | None = None) -> str:
    """The whole page; the tables of a folder take the place of ours."""
    known = tables(instead)
    synthetic = table(
        ["claim", "paper", "here", "status"], [[x.claim, x.paper, x.here, f"**{x.status}.** {x.why}"] for x in CLAIMS_B]
    )
    parts = [OPENING, of_claims(CLAIMS_A, known), CLOSING["A"], synthetic, CLOSING["B"], of_findings(FINDINGS, known)]
    return "\n\n".join([*parts, CLOSING["findings"]]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
