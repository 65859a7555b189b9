"""Tables, figures and pages of a report, from the templates in ``templates/``.

Templates escape everything that is not ``Markup``. Strings from a model, a text or an error are never ``Markup``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pandas.api.types import is_float_dtype

from tl_posdisent.page.words import number
from tl_posdisent.utils.validation import head_label, printable
from tl_posdisent.viz.palette import BLACK, WHITE, inks, on_scale
from tl_posdisent.viz.widgets.offline import script_json

ROWS = 512
"""A table has at most this many rows, which keeps the file of a large model small."""


def printable_lines(text: Any) -> str:
    """Escape invisible characters other than spaces and line breaks."""
    return "\n".join(map(printable, str(text).split("\n")))


_TEMPLATES = Environment(
    loader=PackageLoader("tl_posdisent.page"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
_TEMPLATES.filters["printable"] = printable_lines


def render(name: str, **values: Any) -> Markup:
    """Render the template ``name`` with these values."""
    return Markup(_TEMPLATES.get_template(f"{name}.html").render(values))


def part(name: str, *values: Any) -> Markup:
    """Return a variable of ``parts.html``, or call one of its macros with these arguments."""
    found = getattr(_TEMPLATES.get_template("parts.html").module, name)
    return Markup(found(*values) if values else found)


def read(name: str) -> str:
    """Read a file of this folder: the page's style or script."""
    return (resources.files("tl_posdisent.page") / name).read_text(encoding="utf-8")


def head_link(layer: Any, head: Any) -> Markup:
    """Return the label of a head as a link to its row in the table of all heads."""
    return Markup('<a href="#{0}">{0}</a>').format(head_label(int(layer), int(head)))


def table(
    name: str,
    caption: str,
    frame: pd.DataFrame,
    titles: Mapping[str, str] | None = None,
    digits: int | Mapping[str, int] = 3,
    heads: Literal["plain", "linked"] = "plain",
) -> Markup:
    """Render the first 512 rows of a table in a box that scrolls.

    The first column names the rows. If the table has ``layer`` and ``head``, these two columns become one label, which
    is the target of links if ``heads="linked"``.
    """
    if len(frame) > ROWS:
        caption = f"{caption}: the first {ROWS} of {len(frame)} rows"
        frame = frame.head(ROWS)
    columns = {str(column): frame[column].tolist() for column in frame}
    for column, values in columns.items():
        if is_float_dtype(frame[column]):
            places = digits if isinstance(digits, int) else digits.get(column, 3)
            columns[column] = [number(x, places) for x in values]
    if {"layer", "head"} <= set(columns):
        pairs = zip(columns.pop("layer"), columns.pop("head"), strict=True)
        columns = {"head": [head_label(int(layer), int(head)) for layer, head in pairs]} | columns
    names = [(titles or {}).get(column, column.replace("_", " ")) for column in columns]
    rows = list(zip(*columns.values(), strict=True))
    return part("table", name, caption, names, rows, heads == "linked")


def figure(
    drawn: go.Figure,
    caption: str,
    *,
    height: int = 340,
    linked: bool = False,
    choices: Mapping[str, Any] | None = None,
) -> Markup:
    """Render a plotly figure with its caption, as data that the page's script draws.

    ``linked`` is for maps of heads: a click on a cell leads to the row of its head. ``choices`` is what else the script
    may draw in the figure's place.
    """
    drawn = go.Figure([one for trace in drawn.data for one in legible(trace)], drawn.layout)
    drawn.update_layout(
        template="plotly_white",
        title=None,
        height=None,
        margin={"t": 20, "r": 20, "b": 50, "l": 60},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        hoverlabel={"bgcolor": WHITE, "font": {"color": BLACK}},  # plotly's own are of the trace's colour, or a grey
        meta="linked" if linked else None,
    )
    drawn.update_xaxes(ticks="outside")  # otherwise the zeros of the two axes overlap
    # On a phone, numbers in cells need more room than the screen has, so the figure scrolls.
    written = [trace for trace in drawn.data if getattr(trace, "texttemplate", None)]
    room = max([180 + (38 if ".2f" in trace.texttemplate else 48) * len(trace.x) for trace in written], default=0)
    data = Markup(drawn.to_json())  # plotly escapes <, > and /
    if choices is not None:
        data = Markup(script_json(json.loads(data) | {"choices": choices}))
    return part("figure", data, caption, height, room)


def legible(trace: Any) -> list[Any]:
    """Split a heat map with numbers by the colour of their text, in the light and in the dark (``meta``).

    Plotly's own choice lacks contrast, and in the dark the page inverts cells and text; the page's script chooses.
    """
    if not isinstance(trace, go.Heatmap) or trace.texttemplate is None:
        return [trace]
    z = np.array(trace.z, dtype=float)
    shares = ((z - trace.zmin) / (trace.zmax - trace.zmin)).clip(0, 1)
    both = [[inks(on_scale(trace.colorscale, share)) for share in row] for row in np.nan_to_num(shares)]
    light, dark = np.moveaxis(np.array(both), -1, 0)
    maps: list[Any] = []
    for colours in sorted({pair for row in both for pair in row}):
        here = (light == colours[0]) & (dark == colours[1])
        one = go.Heatmap(trace, z=np.where(here, z, np.nan), textfont={"color": colours[0]}, meta=colours)
        if trace.text is not None:  # which plotly writes in cells without a number, too
            one.text = np.where(here, trace.text, "")
        maps.append(one.update(hoverongaps=False, showscale=not maps))
    return maps


def map_height(rows: int) -> int:
    """Compute the height of a map of heads in pixels."""
    return min(900, 110 + max(6, rows) * 24)
