"""Pieces of HTML: everything that comes from a model or a text goes through ``escape``."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from pandas.api.types import is_integer_dtype

MISSING = "–"
ROWS = 512
"""A table has no more: the file is to stay below 3 MB for large models too."""


def escape(text: Any) -> str:
    """Text that may stand anywhere in HTML, in attributes too; nothing invisible but spaces and line breaks in it."""
    shown = "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in str(text)
    )
    return html.escape(shown)


def number(x: float | int, digits: int = 3) -> str:
    """A number to so many digits behind the point, with a true minus sign."""
    if not math.isfinite(x):
        return MISSING
    return f"{round(x, digits) + 0.0:.{digits}f}".replace("-", "−")


def signed(x: float | int, digits: int = 3) -> str:
    """A change: with its sign."""
    text = number(x, digits)
    return f"+{text}" if x > 0 and text.strip("0.") else text


def plural(n: int, what: str) -> str:
    """``1 layer``, ``5 layers``."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def numbers(values: Sequence[int]) -> str:
    """Layers or heads in words: ``0 to 4``, or ``0, 3, 5``."""
    if len(values) > 2 and list(values) == list(range(values[0], values[-1] + 1)):
        return f"{values[0]} to {values[-1]}"
    return ", ".join(map(str, values))


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of HTML."""
    return f'<p class="{kind}">{text}</p>' if kind else f"<p>{text}</p>"


def folded(summary: str, content: str) -> str:
    """What is shown when asked for."""
    return f"<details><summary>{summary}</summary>{content}</details>"


def table(
    name: str,
    caption: str,
    frame: pd.DataFrame,
    titles: Mapping[str, str] | None = None,
    digits: int | Mapping[str, int] = 3,
    index: int = 1,
) -> str:
    """The first 512 rows of a table in a box of its own that scrolls; the first ``index`` columns name the row."""
    titles = titles or {}
    if len(frame) > ROWS:
        caption = f"{caption}: the first {ROWS} of {len(frame)} rows"
        frame = frame.head(ROWS)
    heads = "".join(f'<th scope="col">{escape(titles.get(c, c.replace("_", " ")))}</th>' for c in frame.columns)
    places = {c: digits if isinstance(digits, int) else digits.get(c, 3) for c in frame.columns}
    columns = [_cells(frame[c], places[c]) for c in frame.columns]
    rows = []
    for row in zip(*columns, strict=True):
        names = "".join(f'<th scope="row">{cell}</th>' for cell in row[:index])
        rows.append(f"<tr>{names}{''.join(f'<td>{cell}</td>' for cell in row[index:])}</tr>")
    return raw_table(name, caption, heads, rows)


def raw_table(name: str, caption: str, heads: str, rows: Iterable[str]) -> str:
    """A table of HTML; the box around it can be scrolled with the keyboard."""
    return (
        f'<div class="scroll" role="group" aria-label="{caption}" tabindex="0"><table id="table-{name}">'
        f"<caption>{caption}</caption><thead><tr>{heads}</tr></thead>\n<tbody>{chr(10).join(rows)}</tbody>"
        "</table></div>"
    )


def _cells(column: Any, digits: int) -> list[str]:
    if is_integer_dtype(column):
        return [str(x) for x in column.tolist()]
    return [number(x, digits) if isinstance(x, float) else escape(x) for x in column.tolist()]
