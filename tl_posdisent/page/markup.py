"""Tables, figures and pages of a report, from the templates in ``templates/``.

Templates escape everything that is not ``Markup``. Strings from a model, a text or an error are never ``Markup``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import resources
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pandas.api.types import is_float_dtype

from tl_posdisent.page.words import MISSING, number, unbroken
from tl_posdisent.utils.validation import head_label, printable
from tl_posdisent.viz.palette import BLACK, WHITE

ROWS = 512
"""A table has at most this many rows, which keeps the file of a large model small."""
_HEIGHT = 340
"""Height of a figure that has none of its own, in pixels."""


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
_TEMPLATES.filters |= {"printable": printable_lines, "unbroken": unbroken}


def render(name: str, **values: Any) -> Markup:
    """Render the template ``name`` with these values."""
    return Markup(_TEMPLATES.get_template(f"{name}.html").render(values))


def _part(name: str, *values: Any) -> Markup:
    """Call a macro of ``parts.html``."""
    return Markup(getattr(_TEMPLATES.get_template("parts.html").module, name)(*values))


def read(name: str) -> str:
    """Read a file beside the templates: the page's style or script."""
    return (resources.files("tl_posdisent.page") / "templates" / name).read_text(encoding="utf-8")


def cells_of(frame: pd.DataFrame, digits: Mapping[str, int]) -> dict[str, list[Any]]:
    """Format the columns of a table; a dash stands for what is missing."""
    columns: dict[str, list[Any]] = {}
    for name in map(str, frame):
        values = frame[name]
        if is_float_dtype(values):
            columns[name] = [number(x, digits.get(name, 3)) for x in values]
        else:
            columns[name] = [MISSING if pd.isna(x) else x for x in values]
    return columns


def table(
    name: str,
    caption: str,
    frame: pd.DataFrame,
    titles: Mapping[str, str],
    digits: Mapping[str, int] | None = None,
    *,
    named: bool = False,
    linked: Collection[str] = (),
) -> Markup:
    """Render the first 512 rows of a table in a box that scrolls.

    The first column names the rows. If the table has ``layer`` and ``head``, these two columns become one label, which
    is the target of links if ``named``, and leads there if it is one of ``linked``.
    """
    if len(frame) > ROWS:
        caption = f"{caption}: the first {ROWS} of {len(frame)} rows"
        frame = frame.head(ROWS)
    columns = cells_of(frame, digits or {})
    if {"layer", "head"} <= set(columns):
        pairs = zip(columns.pop("layer"), columns.pop("head"), strict=True)
        columns = {"head": [head_label(int(layer), int(head)) for layer, head in pairs]} | columns
    names = [titles.get(column, column.replace("_", " ")) for column in columns]
    return _part("table", name, caption, names, list(zip(*columns.values(), strict=True)), named, linked)


def figure(drawn: go.Figure, caption: str) -> Markup:
    """Render a plotly figure with its caption, as data that the page's script draws.

    ``meta="linked"`` in the layout is for maps of heads, and for points whose custom data begin with a head's label: a
    click opens the panel of the head.
    """
    height = int(drawn.layout.height or _usual_height(drawn))
    drawn = go.Figure(drawn).for_each_trace(_remove_cell_text)
    drawn.update_layout(
        template="plotly_white",
        title=None,
        height=None,
        margin={"t": 20, "r": 20, "b": 50, "l": 60},
        legend={} if drawn.layout.legend.y else {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        hoverlabel={"bgcolor": WHITE, "font": {"color": BLACK}},  # plotly's own are of the trace's colour, or a grey
    )
    drawn.update_xaxes(ticks="outside")  # otherwise the zeros of the two axes overlap
    return _part("figure", Markup(drawn.to_json()), caption, height)  # plotly escapes <, > and /


def _usual_height(drawn: go.Figure) -> int:
    """Return the height of a map by its layers, or that of other figures, in pixels."""
    first = drawn.data[0] if drawn.data else None
    return map_height(len(first.y)) if isinstance(first, go.Heatmap) else _HEIGHT


def map_height(rows: int) -> int:
    """Compute the height of a map of heads in pixels."""
    return min(900, 110 + max(6, rows) * 24)


def _remove_cell_text(trace: Any) -> None:
    """Remove the numbers from the cells of a heat map: no ink has enough contrast to all colours; tables have them."""
    if isinstance(trace, go.Heatmap):
        trace.update(text=None, texttemplate=None)
