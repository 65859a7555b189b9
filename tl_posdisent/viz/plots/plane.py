"""The where–what plane: what the contribution of each head depends on, in a triangle of its three parts."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from math import nan
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from tl_posdisent.experiments.where_what.head_table import row_names
from tl_posdisent.experiments.where_what.verdicts import HALF, SIMILAR
from tl_posdisent.utils.validation import check_integer
from tl_posdisent.viz.palette import GREY, NEEDS, faint
from tl_posdisent.viz.plots.label_places import Box, Sizes, corner_box, corner_word, disc, label_places
from tl_posdisent.viz.plots.plane_heads import (
    X,
    Y,
    arrows,
    crosses,
    drawable,
    markers,
    outlines,
    points_of,
    present,
    same_heads,
)
from tl_posdisent.viz.plots.tables import add_title

_OBSTACLE = 8.0  # width from which no label may lie over a marker; over a smaller one it can be read
_X_RANGE, _Y_RANGE = (-0.04, 1.04), (-0.11, 1.13)
_CORNERS = {(0, 0): "neither", (1, 0): "where", (0, 1): "what"}
"""The part that is all of the contribution at each corner of the triangle; its name is in that corner of the plot."""
_MARGIN = {"l": 65, "r": 20}
_FREE_WIDTHS = (240.0, 1900.0)
"""The widths of the area inside the axes, in pixels, for which labels are placed if that of the figure is free."""
_BESIDE, _ABOVE_AND_BELOW, _TICKS = 85, 140, 20
"""Pixels around the axes, titles and ticks; the last for which plotly may make more room."""
_FREE_WIDTH = 700
"""Width in pixels for which the title of a figure of free width is broken into lines."""
_CHARACTER, _LINE = 7.0, 20
"""Width and height of a character in the counts below the title and in the legend, in pixels."""
_LEGEND = {
    "x": 1,
    "y": 1,
    "xanchor": "right",
    "yanchor": "top",
    "itemsizing": "constant",
    "tracegroupgap": 0,
    "bgcolor": "rgba(0,0,0,0)",
}
_SYMBOL = 45
"""Width in pixels of a row of the legend without its words."""


def plot_where_or_what(
    table: pd.DataFrame,
    *,
    random: pd.DataFrame | None = None,
    after: pd.DataFrame | None = None,
    labels: int = 10,
    width: int | None = None,
    height: int = 560,
    title: str | None = None,
) -> go.Figure:
    """Plot the parts of each head's contribution: *where* across, *what* upwards, and *neither* as the rest.

    The parts sum to one, so heads lie in a triangle: its corners are *where*, *what* and *neither*, and the distance
    from its long side is *neither*. The dotted line is at half *neither*; in the band from there to the long side,
    *where* and *what* differ by less than .2 (*mixed*). The area of a marker is proportional to the head's
    contribution; undecided heads are diamonds, unused ones lines, and a black outline marks ``joint`` above .3: where
    and what are needed together. Hovering shows the numbers with their errors. A single head has its standard errors
    over texts as error bars. A figure too small for its legend has none.

    Args:
        table: table of ``where_or_what``, of heads or of groups.
        random: table of ``where_or_what`` for random copies of the model, whose heads are grey crosses.
        after: table of the same heads of another model. An arrow leads from the place of a head to its place there, if
            these are at least .04 apart and the head is used in both.
        labels: how many heads of the largest contribution are labelled. A label that would overlap a large marker or
            another label is moved away, with a line to its head; without room it is left out: hover over the head.
        width: of the figure in pixels, for which labels are placed; default as wide as its page allows, with labels for
            any width.
        height: of the figure in pixels, for which labels are placed.
        title: title of the figure; default a description with the number of heads per verdict, of both models if there
            are two, or the name of a single head.

    Raises:
        ValueError: a table without these columns or rows, or with several rows for a head; ``after`` of other heads;
            labels that are not an integer from 0 on; a width or a height below 250.

    Example:
        >>> import pandas as pd
        >>> from tl_posdisent.viz import plot_where_or_what
        >>> heads = {"layer": [0, 0], "head": [0, 1], "contribution": [0.1, 0.02], "verdict": ["where", "what"]}
        >>> parts = {"where_part": [0.8, 0.1], "what_part": [0.1, 0.7], "neither_part": [0.1, 0.2]}
        >>> [trace.name for trace in plot_where_or_what(pd.DataFrame({**heads, **parts})).data]
        ['where', 'what']
    """
    table = drawable(table, "table")
    behind = [] if random is None else [crosses(drawable(random, "random", several=True))]
    if after is not None:
        after = same_heads(drawable(after, "after"), table)
        behind.append(arrows(table, after))
    check_integer("labels", labels, 0)
    check_integer("height", height, 250)
    lines = [] if title is not None else _count_lines(table, after, width)
    inside = _widths(width), _heights(height, len(lines))
    heads = points_of(table)
    before = outlines(heads)
    others = {str(trace.name) for trace in [*behind, *before]}
    legend = _legend_box([*present(heads), *others], inside)
    heads = _with_labels(heads, labels, [] if legend is None else [legend], inside)
    by_verdict = [(verdict, heads[heads["verdict"] == verdict]) for verdict in present(heads)]
    of_verdicts = [markers(some, verdict, after, bars=len(table) == 1) for verdict, some in by_verdict]
    figure = go.Figure([*behind, *of_verdicts, *before])
    _draw_triangle(figure)
    _add_far_labels(figure, heads)
    figure.update_layout(legend=_LEGEND, showlegend=legend is not None, width=width, height=height)
    return _titled(figure, table, title, lines)


def _widths(width: int | None) -> tuple[float, float]:
    """Return the least and the largest width of the area inside the axes: both are the same for a figure of a width."""
    if width is None:
        return _FREE_WIDTHS
    inside = float(check_integer("width", width, 250) - _BESIDE)
    return inside, inside


def _heights(height: int, n_lines: int) -> tuple[float, float]:
    """Return the least and the largest height of the area inside the axes, below so many lines of counts."""
    least, most = (
        height - around - _LINE * max(n_lines - 1, 0) for around in (_ABOVE_AND_BELOW + _TICKS, _ABOVE_AND_BELOW)
    )
    return float(least), float(most)


def _legend_box(entries: Sequence[str], sizes: Sizes) -> Box | None:
    """Return the rectangle of the legend, in the corner beyond the long side; None if it needs more room than there is.

    A single entry needs no legend.
    """
    half = (_SYMBOL + _CHARACTER * max(map(len, entries), default=0)) / 2, _LINE * (len(entries) + 0.5) / 2
    fits = sum(2 * one / largest for one, (_, largest) in zip(half, sizes, strict=True)) <= 1
    return corner_box((1, 1), half) if fits and len(entries) > 1 else None


def _with_labels(points: pd.DataFrame, n_labels: int, obstacles: Sequence[Box], sizes: Sizes) -> pd.DataFrame:
    """Add the labels of the heads that contribute most, and their positions, or how far away they are in pixels."""
    at = [(_share_of(x, _X_RANGE), _share_of(y, _Y_RANGE)) for x, y in zip(points[X], points[Y], strict=True)]
    discs = [*map(disc, at, points["size"])]
    words = [corner_word(corner, text) for corner, text in _CORNERS.items()]
    large = [disc(place, width) for place, width in zip(at, points["outer"], strict=True) if width >= _OBSTACLE]
    labels = [*zip(points["name"], discs, strict=True)][:n_labels]
    places = label_places(labels, [*obstacles, *words, *large], sizes)
    places += [None] * (len(points) - len(places))
    beside = [place and place.position for place in places]
    away = [(nan, nan) if place is None or place.position else place.offset for place in places]
    return points.assign(
        label=[name if position else "" for name, position in zip(points["name"], beside, strict=True)],
        position=[position or "top center" for position in beside],
        to_the_right=[x for x, _ in away],
        upwards=[y for _, y in away],
    )


def _add_far_labels(figure: go.Figure, heads: pd.DataFrame) -> None:
    """Write the labels for which there is no room beside their markers, with lines to them."""
    far = heads.dropna(subset=["to_the_right", "upwards"])
    columns = far[["name", X, Y, "size", "to_the_right", "upwards"]]
    for name, x, y, size, to_the_right, upwards in columns.itertuples(index=False, name=None):
        line = {"arrowhead": 0, "arrowwidth": 1, "arrowcolor": GREY, "standoff": size / 2}
        figure.add_annotation(text=name, x=x, y=y, ax=to_the_right, ay=-upwards, borderpad=0, **line)


def _share_of(value: float, limits: tuple[float, float]) -> float:
    """Return the place of a value in the range of an axis, from 0 to 1."""
    return (value - limits[0]) / (limits[1] - limits[0])


def _draw_triangle(figure: go.Figure) -> None:
    """Draw the triangle of the parts, with the region of *mixed* and the line of half *neither*; name its corners."""
    axis = {"tickformat": ".0%", "zeroline": False, "showgrid": False}
    figure.update_xaxes(title="where (part)", range=_X_RANGE, **axis).update_yaxes(
        title="what (part)", range=_Y_RANGE, **axis
    )
    for (x, y), text in _CORNERS.items():
        across, up = ("left", "right")[x], ("bottom", "top")[y]
        place = {"x": x, "y": y, "xref": "paper", "yref": "paper", "xanchor": across, "yanchor": up}
        figure.add_annotation(text=text, showarrow=False, borderpad=0, **place)
    near, far = ((total - SIMILAR) / 2 for total in (1 - HALF, 1))  # the lesser part at the ends of the band
    mixed = [(near + SIMILAR, near), (far + SIMILAR, far), (far, far + SIMILAR), (near, near + SIMILAR)]
    _add_path(figure, mixed, fillcolor=faint(NEEDS["mixed"]), opacity=0.5, line_width=0)
    _add_path(figure, [(1 - HALF, 0), (0, 1 - HALF)], line={"color": GREY, "dash": "dot", "width": 1})
    _add_path(figure, [(0, 0), (1, 0), (0, 1), (0, 0)], line={"color": GREY, "width": 1})


def _add_path(figure: go.Figure, corners: Sequence[tuple[float, float]], **options: Any) -> None:
    """Draw a line through these places, or fill the area inside, behind the heads."""
    path = "M" + "L".join(f"{x:g},{y:g}" for x, y in corners)
    figure.add_shape(type="path", path=path, layer="below", **options)


def _titled(figure: go.Figure, table: pd.DataFrame, title: str | None, lines: Sequence[str]) -> go.Figure:
    """Add the title, by default with these lines below it."""
    of_each = "each group" if "group" in table else "each head"
    add_title(figure, title, f"What {row_names(table)[0] if len(table) == 1 else of_each} needs", "<br>".join(lines))
    margin = {**_MARGIN, "t": figure.layout.margin.t + _LINE * max(len(lines) - 1, 0)}
    return figure.update_layout(margin=margin, title={"y": 1, "yanchor": "top", "pad": {"t": 20}})  # grows downwards


def _count_lines(table: pd.DataFrame, after: pd.DataFrame | None, width: int | None) -> list[str]:
    """Write the number of heads of each verdict in each model, in lines that fit the width; none of a single head."""
    if len(table) == 1:
        return []
    counted = [_counted(table)] if after is None else [f"before: {_counted(table)}", f"after: {_counted(after)}"]
    return [line for words in counted for line in textwrap.wrap(words, int((width or _FREE_WIDTH) / _CHARACTER))]


def _counted(table: pd.DataFrame) -> str:
    """Count the heads of each verdict in words."""
    return ", ".join(f"{(table['verdict'] == verdict).sum()} {verdict}" for verdict in present(table))
