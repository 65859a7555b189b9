"""Pieces of HTML: everything that comes from a model or a text goes through ``escape``."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

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


def short(x: float | int, largest: float | int) -> str:
    """A number in at most five characters, for a small cell or a tick; ``largest`` is that of its neighbours."""
    if not math.isfinite(x):
        return MISSING
    if x == 0:
        return "0"
    if 1e-2 <= abs(largest) < 1e4:
        digits = 0 if abs(largest) >= 100 else 1 if abs(largest) >= 10 else 2
        return number(x, digits)
    mantissa, _, power = f"{x:.0e}".partition("e")
    return f"{mantissa}e{int(power)}".replace("-", "−")


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
    heads: Literal["none", "named", "linked"] = "none",
) -> str:
    """The first 512 rows of a table in a box of its own that scrolls; the first ``index`` columns name the row.

    ``heads="named"``: rows can be linked to, by layer and head; ``"linked"``: layer and head are links to such rows.
    """
    titles = titles or {}
    if len(frame) > ROWS:
        caption = f"{caption}: the first {ROWS} of {len(frame)} rows"
        frame = frame.head(ROWS)
    names_of = list(zip(frame["layer"], frame["head"], strict=True)) if heads != "none" else []
    columns_row = "".join(f'<th scope="col">{escape(titles.get(c, c.replace("_", " ")))}</th>' for c in frame.columns)
    places = {c: digits if isinstance(digits, int) else digits.get(c, 3) for c in frame.columns}
    columns = [_cells(frame[c], places[c]) for c in frame.columns]
    rows = []
    for n, row in enumerate(zip(*columns, strict=True)):
        cells = [f'<a href="#{head_id(*names_of[n])}">{cell}</a>' for cell in row[:index]] if heads == "linked" else row
        names = "".join(f'<th scope="row">{cell}</th>' for cell in cells[:index])
        start = f'<tr id="{head_id(*names_of[n])}">' if heads == "named" else "<tr>"
        rows.append(f"{start}{names}{''.join(f'<td>{cell}</td>' for cell in row[index:])}</tr>")
    return raw_table(name, caption, columns_row, rows)


def head_id(layer: Any, head: Any) -> str:
    """The id of a head's row, to which tables and maps link."""
    return f"head-{int(layer)}-{int(head)}"


def head_link(layer: Any, head: Any) -> str:
    """Layer and head in words, as a link to its row."""
    return f'<a href="#{head_id(layer, head)}">layer {int(layer)}, head {int(head)}</a>'


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
