"""Tables, figures and pages of a report, from the templates in ``templates/``.

Templates escape everything that is not ``Markup``. Strings from a model, a text or an error are never ``Markup``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any, Literal

import pandas as pd
import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pandas.api.types import is_float_dtype

from tl_posdisent.page.deciding.words import number
from tl_posdisent.utils.validation import head_label, printable
from tl_posdisent.viz.palette import BLACK, WHITE
from tl_posdisent.viz.widgets.offline import script_json

ROWS = 512
"""A table has at most this many rows, which keeps the file of a large model small."""


def printable_lines(text: Any) -> str:
    """Escape invisible characters other than spaces and line breaks."""
    return "\n".join(map(printable, str(text).split("\n")))


_TEMPLATES = Environment(
    loader=PackageLoader("tl_posdisent.page.drawing"),
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
    variable_or_macro = getattr(_TEMPLATES.get_template("parts.html").module, name)
    return Markup(variable_or_macro(*values) if values else variable_or_macro)


def read(name: str) -> str:
    """Read a file of this folder: the page's style or script."""
    return (resources.files("tl_posdisent.page.drawing") / name).read_text(encoding="utf-8")


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

    ``linked`` is for maps of heads, and for points whose custom data begin with a head's label: a click opens the panel
    of the head. ``choices`` is what else the script
    may draw in the figure's place.
    """
    drawn = go.Figure(drawn).for_each_trace(remove_cell_text)
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
    data = Markup(drawn.to_json())  # plotly escapes <, > and /
    if choices is not None:
        data = Markup(script_json(json.loads(data) | {"choices": choices}))
    return part("figure", data, caption, height)


def remove_cell_text(trace: Any) -> None:
    """Remove the numbers from the cells of a heat map: no ink has enough contrast to all colours; tables have them."""
    if isinstance(trace, go.Heatmap):
        trace.update(text=None, texttemplate=None)


def map_height(rows: int) -> int:
    """Compute the height of a map of heads in pixels."""
    return min(900, 110 + max(6, rows) * 24)
