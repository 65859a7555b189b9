"""HTML of sentences, tables and figures. What comes from a model or a text goes through ``escape``."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from pandas.api.types import is_float_dtype

from tl_posdisent.utils.validation import head_label
from tl_posdisent.viz.palette import BLACK, WHITE, ink, on_scale

MISSING = "–"
ROWS = 512
"""A table has no more, which keeps the file of a large model small."""


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
    return f'<p class="{kind}">{text}</p>' if kind else f"<p>{text}</p>"


def folded(summary: str, content: str) -> str:
    """Content that a click unfolds."""
    return f"<details><summary>{summary}</summary>{content}</details>"


def definitions(rows: Mapping[str, Any], more: str = "") -> str:
    """Names and their plain text, as a list; ``more`` is HTML at its end."""
    return f"<dl>{''.join(f'<dt>{name}</dt><dd>{escape(value)}</dd>' for name, value in rows.items())}{more}</dl>"


def head_link(layer: Any, head: Any) -> str:
    """The label of a head, as a link to its row in the table of all heads."""
    label = head_label(int(layer), int(head))
    return f'<a href="#{label}">{label}</a>'


def table(
    name: str,
    caption: str,
    frame: pd.DataFrame,
    titles: Mapping[str, str] | None = None,
    digits: int | Mapping[str, int] = 3,
    heads: Literal["plain", "named"] = "plain",
) -> str:
    """The first 512 rows of a table in a box that scrolls. Strings in it are HTML.

    The first column names the rows: of a table with ``layer`` and ``head`` these two, as a label, which is the target
    of links (``heads="named"``).
    """
    if len(frame) > ROWS:
        caption = f"{caption}: the first {ROWS} of {len(frame)} rows"
        frame = frame.head(ROWS)
    shown = frame.astype(object)
    for column in map(str, frame):
        if is_float_dtype(frame[column]):
            places = digits if isinstance(digits, int) else digits.get(column, 3)
            shown[column] = [number(x, places) for x in frame[column].tolist()]
    if {"layer", "head"} <= set(frame):
        labels = [head_label(int(x), int(y)) for x, y in zip(frame["layer"], frame["head"], strict=True)]
        tag = {"plain": "{0}", "named": '<a id="{0}">{0}</a>'}[heads]
        shown = shown.drop(columns=["layer", "head"])
        shown.insert(0, "head", [tag.format(label) for label in labels])
    names = [(titles or {}).get(column, column.replace("_", " ")) for column in map(str, shown)]
    shown = shown.set_axis(names, axis=1).set_index(names[0]).rename_axis(index=None, columns=names[0])
    with pd.option_context("display.max_colwidth", None):  # or links are cut
        lines = shown.to_html(table_id=f"table-{name}", border=0, escape=False).splitlines()
    top, _, body = "\n".join(map(str.strip, lines)).partition("<tbody>")  # without pandas's spaces
    top = top.replace("<thead>", f"<caption>{caption}</caption><thead>").replace("<th>", '<th scope="col">')
    body = body.replace("<th>", '<th scope="row">')
    return f'<div class="scroll" role="group" aria-label="{caption}" tabindex="0">{top}<tbody>{body}</div>'


def figure(drawn: go.Figure, caption: str, *, height: int = 340, linked: bool = False) -> str:
    """A plotly figure with its caption, as data that the page's script draws.

    ``linked``: it is a map of heads, and a click on a cell leads to the row of its head.
    """
    drawn = go.Figure([legible for trace in drawn.data for legible in _legible(trace)], drawn.layout)
    drawn.update_layout(
        template="plotly_white",
        title=None,
        height=None,
        margin={"t": 20, "r": 20, "b": 50, "l": 60},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        meta="linked" if linked else None,
    )
    drawn.update_xaxes(ticks="outside")  # or a 0 lies over that of the other axis
    # On a phone, numbers in cells need more room than there is: the figure scrolls.
    written = [trace for trace in drawn.data if getattr(trace, "texttemplate", None)]
    room = max([180 + (38 if ".2f" in trace.texttemplate else 48) * len(trace.x) for trace in written], default=0)
    return (
        f'<figure><div class="scroll" tabindex="0"><div class="plot" role="img" aria-label="{caption}" '
        f'style="height:{height}px;min-width:{room}px"></div>'
        f'<script type="application/json">{drawn.to_json()}</script></div><figcaption>{caption}</figcaption></figure>'
    )


def _legible(trace: Any) -> list[Any]:
    """A map with numbers as two, of the cells with black and with white ones: plotly's choice lacks contrast."""
    if not isinstance(trace, go.Heatmap) or trace.texttemplate is None:
        return [trace]
    z = np.array(trace.z, dtype=float)
    shares = ((z - trace.zmin) / (trace.zmax - trace.zmin)).clip(0, 1)
    inks = np.array([[ink(on_scale(trace.colorscale, share)) for share in row] for row in np.nan_to_num(shares)])
    maps = [
        go.Heatmap(trace, z=np.where(inks == colour, z, np.nan), textfont={"color": colour})
        for colour in (BLACK, WHITE)
    ]
    return [one.update(hoverongaps=False, showscale=n == 0) for n, one in enumerate(maps)]


def map_height(rows: int) -> int:
    return min(900, 110 + max(6, rows) * 24)
