"""The where–what plane: what the contribution of each head needs."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any, Literal

import pandas as pd
import plotly.graph_objects as go

from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_integer, head_label
from tl_posdisent.viz.palette import GREY, NEEDS
from tl_posdisent.viz.plots.label_places import Sizes, corner_word, disc, label_positions
from tl_posdisent.viz.plots.tables import add_title, check_table

_LARGEST = 34.0  # diameter of the head of largest contribution, in pixels
_LEAST = 5.0
_ALONE = 10.0  # diameter of a single head, from which its error bars stand out
_OBSTACLE = 16.0  # diameter from which no label may lie over a marker; over a smaller one it can be read
_X_RANGE, _Y_RANGE = (-0.04, 1.04), (-0.11, 1.13)
_CORNERS = {(0, 0): "both", (1, 0): "where", (0, 1): "what", (1, 1): "either or neither"}
"""The verdict of each quarter, by the corner in which it is written: (0, 0) is the lower left one."""
_AROUND = {"width": 200, "height": 160}
"""Pixels around the axes: titles, ticks and the legend."""
_USUAL = {"width": (240.0, 1000.0), "height": (280.0, 450.0)}
"""The sizes of the area inside the axes, in pixels, for which labels are placed if that of the figure is free."""
_FREE_WIDTH = 700
"""Width in pixels for which the title of a figure of free width is broken into lines."""
_CHARACTER, _LINE = 7.0, 20
"""Width and height of a character in the counts below the title, in pixels."""


def plot_where_or_what(
    table: pd.DataFrame,
    *,
    labels: int = 10,
    width: int | None = None,
    height: int | None = None,
    title: str | None = None,
) -> go.Figure:
    """Plot each head by the share of its contribution that survives with distances alone (x) and content alone (y).

    Each quarter of the plane is a verdict of ``where_or_what``. The area of a marker is proportional to the head's
    contribution; markers of undecided heads are hollow. Hovering shows the numbers with their errors. A single head has
    its standard errors over texts as error bars, which end at 0 and 1 as the shares do.

    Args:
        table: table of ``where_or_what``.
        labels: how many heads of the largest contribution are labelled. A label that would overlap a large marker or
            another label is left out: hover over the head instead.
        width, height: size of the figure in pixels, for which labels are placed; default as large as its page allows,
            with labels for the usual sizes.
        title: title of the figure; default a description with the number of heads per verdict, or the name of a single
            head.

    Raises:
        ValueError: a table without these columns or rows, or with several rows for a head; labels that are not an
            integer from 0 on; a width or a height below 250.

    Example:
        >>> import pandas as pd
        >>> from tl_posdisent.viz import plot_where_or_what
        >>> heads = {"layer": [0, 0], "head": [0, 1], "where": [0.9, 0.1], "what": [0.2, 0.8]}
        >>> table = pd.DataFrame({**heads, "contribution": [0.1, 0.02], "verdict": ["where", "what"]})
        >>> [trace.name for trace in plot_where_or_what(table).data]
        ['where', 'what']
    """
    numbers = ["where", "what", "contribution"]
    table = check_table(table, ["layer", "head", "verdict"], numbers, "where_or_what")
    check_integer("labels", labels, 0)
    inside = _size_inside("width", width), _size_inside("height", height)
    _check_heads(table)
    figure = go.Figure(_traces(table, labels, inside))
    _name_quarters(figure)
    axis = {"tickformat": ".0%", "zeroline": False}
    figure.update_layout(
        xaxis={"title": "where (distances alone)", "range": _X_RANGE, **axis},
        yaxis={"title": "what (content alone)", "range": _Y_RANGE, **axis},
        legend={"title": "verdict", "itemsizing": "constant"},
        width=width,
        height=height,
    )
    if len(table) == 1:
        return add_title(figure, title, f"What {_names(table)[0]} needs")
    counted = ", ".join(f"{(table['verdict'] == verdict).sum()} {verdict}" for verdict in _present(table))
    lines = textwrap.wrap(counted, int((width or _FREE_WIDTH) / _CHARACTER))
    add_title(figure, title, "What each head needs", "<br>".join(lines))
    more = 0 if title is not None else _LINE * (len(lines) - 1)
    return figure.update_layout(margin_t=figure.layout.margin.t + more)


def _size_inside(name: Literal["width", "height"], size: int | None) -> tuple[float, float]:
    """Return the least and the largest size of the area inside the axes; both are the same for a figure of a size."""
    if size is None:
        return _USUAL[name]
    inside = float(check_integer(name, size, 250) - _AROUND[name])
    return inside, inside


def _name_quarters(figure: go.Figure) -> None:
    """Write the verdict of each quarter in its corner, and draw the lines between quarters over the grid."""
    for (x, y), text in _CORNERS.items():
        across, up = ("left", "right")[x], ("bottom", "top")[y]
        place = {"x": x, "y": y, "xref": "paper", "yref": "paper", "xanchor": across, "yanchor": up}
        figure.add_annotation(text=text, showarrow=False, borderpad=0, **place)
    for line in ({"x0": 0.5, "x1": 0.5, "y0": 0, "y1": 1}, {"x0": 0, "x1": 1, "y0": 0.5, "y1": 0.5}):
        figure.add_shape(type="line", **line, line={"color": GREY, "dash": "dot", "width": 1}, layer="between")


def _check_heads(table: pd.DataFrame) -> None:
    """Raise if a head has several rows."""
    repeated = table[table.duplicated(["layer", "head"])]
    if len(repeated):
        raise ArgumentError(
            "table",
            f"must have one row for each layer and head, got several for {_names(repeated)[0]}: select the rows of one "
            "model, or draw a figure for each",
        )


def _names(table: pd.DataFrame) -> list[str]:
    return [head_label(layer, head) for layer, head in zip(table["layer"], table["head"], strict=True)]


def _present(table: pd.DataFrame) -> list[str]:
    """Return the verdicts of a table in the order of the legend."""
    return [verdict for verdict in NEEDS if (table["verdict"] == verdict).any()]


def _traces(table: pd.DataFrame, n_labels: int, sizes: Sizes) -> list[go.Scatter]:
    """Draw the heads that have shares, those of one verdict as a trace; the heads that contribute most are labelled."""
    known = table[table["where"].notna() & table["what"].notna()]
    largest = _ALONE if len(table) == 1 else _LARGEST
    size = (known["contribution"] / known["contribution"].max()).clip(0, 1) ** 0.5 * largest
    points = known.assign(
        name=_names(known),
        size=size.clip(lower=_LEAST),
        hover=[_hover(row) for row in known.to_dict("records")],
    ).sort_values("contribution", ascending=False, kind="stable")
    discs = [
        disc((_share_of(x, _X_RANGE), _share_of(y, _Y_RANGE)), diameter)
        for x, y, diameter in points[["where", "what", "size"]].itertuples(index=False)
    ]
    words = [corner_word(corner, text) for corner, text in _CORNERS.items()]
    large = [one for one, diameter in zip(discs, points["size"], strict=True) if diameter >= _OBSTACLE]
    labels = [*zip(points["name"], discs, strict=True)][:n_labels]
    positions = label_positions(labels, [*words, *large], sizes)
    positions += [None] * (len(points) - len(positions))
    points = points.assign(
        label=[name if position else "" for name, position in zip(points["name"], positions, strict=True)],
        position=[position or "top center" for position in positions],
    )
    bars = len(table) == 1
    return [_markers(points[points["verdict"] == verdict], verdict, bars=bars) for verdict in _present(points)]


def _share_of(value: float, limits: tuple[float, float]) -> float:
    """Return the place of a value in the range of an axis, from 0 to 1."""
    return (value - limits[0]) / (limits[1] - limits[0])


def _markers(heads: pd.DataFrame, verdict: str, *, bars: bool) -> go.Scatter:
    return go.Scatter(
        x=heads["where"],
        y=heads["what"],
        mode="markers+text",
        name=verdict,
        text=heads["label"],
        textposition=heads["position"],
        error_x=_error_bar(heads, "where") if bars else None,
        error_y=_error_bar(heads, "what") if bars else None,
        marker={
            "size": heads["size"],
            "color": NEEDS[verdict],
            "symbol": "circle-open" if verdict == "undecided" else "circle",
            "opacity": 0.75,
        },
        customdata=heads[["name", "hover"]],
        hovertemplate="%{customdata[0]}: %{customdata[1]}<extra></extra>",
        cliponaxis=False,
    )


def _error_bar(heads: pd.DataFrame, name: str) -> dict[str, Any] | None:
    """Return the error bar of a share, of one standard error about its unclipped value; None without errors."""
    if f"{name}_se" not in heads:
        return None
    middle, error = heads.get(f"{name}_unclipped", heads[name]), heads[f"{name}_se"]
    up, down = ((middle + error).clip(0, 1) - heads[name], heads[name] - (middle - error).clip(0, 1))
    return {"type": "data", "array": up, "arrayminus": down, "thickness": 1.5}


def _hover(head: Mapping[Any, Any]) -> str:
    """Describe a head: verdict, shares without clipping and contribution, with errors if the table has them."""
    parts = [str(head["verdict"])]
    for name in ("where", "what"):
        error = f" ± {head[f'{name}_se']:.2f}" if f"{name}_se" in head else ""
        parts.append(f"{name} {head.get(f'{name}_unclipped', head[name]):.2f}{error}")
    error = f" ± {head['contribution_se']:.2g}" if "contribution_se" in head else ""
    parts.append(f"contribution {head['contribution']:.2g}{error} nats per token")
    return ", ".join(parts) + (" (± standard error over texts)" if "where_se" in head else "")
