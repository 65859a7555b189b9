"""The heads of the where–what plane: their rows checked, and drawn as markers, outlines, crosses and arrows."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tl_posdisent.experiments.where_what.head_table import row_names
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.tables import HEAD
from tl_posdisent.viz.palette import BLACK, GREY, NEEDS
from tl_posdisent.viz.plots.tables import check_table

X, Y = "where_part", "what_part"
"""The columns of the axes."""
_HOVER: Final = {
    X: ("where", ".0%"),
    Y: ("what", ".0%"),
    "neither_part": ("neither", ".0%"),
    "joint": ("joint", ".2f"),
    "kept_distance": ("kept by distance", ".2f"),
    "kept_content": ("kept by content", ".2f"),
    "kept_uniform": ("kept by uniform", ".2f"),
    "gate": ("kept by gate", ".2f"),
    "contribution": ("nats per token", ".2g"),
}
"""The numbers of the hover text, of those that a table has: their titles, and their formats in d3."""
_JOINT: Final = 0.3
"""Heads of ``joint`` above this have a black outline."""
_MOVED: Final = 0.04
"""Distance in the plane from which an arrow joins the places of a head in two models."""
_LARGEST = 34.0  # diameter of the head of largest contribution, in pixels
_LEAST = 5.0
_ALONE = 10.0  # diameter of a single head, from which its error bars stand out
_DIAMOND = 1.3  # how much wider plotly draws a diamond than a disc of the same size, which has nearly the same area
_LINE = 1.5  # width of the outline of a large joint part, in pixels, which is around the marker
_SYMBOLS: Final = {"undecided": "diamond", "not used": "line-ew"}
"""The markers that are no discs, as in the map of a report; their colours are pale, so they have an outline."""
_OUTLINE: Final = {"color": "#7a7a7a", "width": 1}  # 3:1 against white at the opacity of a marker


def drawable(table: Any, name: str, *, several: bool = False) -> pd.DataFrame:
    """Return the table, or raise unless it has the columns that are drawn, and one row for each head or group.

    Args:
        name: of the argument.
        several: accept several rows for a head.
    """
    index = ["group"] if "group" in getattr(table, "columns", ()) else HEAD
    with naming(table=name):
        checked = check_table(table, [*index, "verdict"], [X, Y, "neither_part", "contribution"], "where_or_what")
        repeated = checked[checked.duplicated(index)]
        if len(repeated) and not several:
            raise ArgumentError(
                "table",
                f"must have one row for each {' and '.join(index)}, got several for {row_names(repeated)[0]}: select "
                "the rows of one model, or draw a figure for each",
            )
    return checked.reset_index(drop=True)


def same_heads(after: pd.DataFrame, before: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of ``after`` in the order of ``before``, and with its index; raise if they are of other heads."""
    own, wanted = row_names(after), row_names(before)
    if missing := [name for name in wanted if name not in own]:
        raise ArgumentError("after", f"must have the heads of table, got one without {missing[0]}")
    if more := [name for name in own if name not in wanted]:
        raise ArgumentError("after", f"must have the heads of table, got one with {more[0]} as well")
    return after.iloc[[own.index(name) for name in wanted]].set_axis(before.index)


def present(table: pd.DataFrame) -> list[str]:
    """Return the verdicts of a table in the order of the legend."""
    return [verdict for verdict in NEEDS if (table["verdict"] == verdict).any()]


def points_of(table: pd.DataFrame) -> pd.DataFrame:
    """Return the heads that have parts, those that contribute most first, with their names.

    ``size`` is that of the marker, whose area shows the contribution, and ``outer`` the width of what is drawn.
    """
    largest = _ALONE if len(table) == 1 else _LARGEST
    size = ((table["contribution"] / table["contribution"].max()).clip(0, 1) ** 0.5 * largest).clip(lower=_LEAST)
    wide = table["verdict"].map({"undecided": _DIAMOND}).fillna(1.0)
    points = table.assign(name=row_names(table), size=size, outer=size * wide)
    return points.dropna(subset=[X, Y]).sort_values("contribution", ascending=False, kind="stable")


def markers(heads: pd.DataFrame, verdict: str, after: pd.DataFrame | None, *, bars: bool) -> go.Scatter:
    """Draw the heads of one verdict, with their labels and, if asked for, their errors.

    Args:
        after: of these heads in another model, for the hover text.
    """
    values, text = _hover(heads, 1)
    if after is not None:
        of_after, more = _hover(after.loc[heads.index], 1 + values.shape[1])
        values, text = values.join(of_after.add_suffix("_after")), f"{text}<br>after: {more}"
    if "heads" in heads:
        values, text = values.assign(heads=heads["heads"]), f"{text}<br>%{{customdata[{1 + values.shape[1]}]}}"
    note = "<br>(± standard error over texts)" if f"{X}_se" in heads else ""
    return go.Scatter(
        x=heads[X],
        y=heads[Y],
        mode="markers+text",
        name=verdict,
        text=heads["label"],
        textposition=heads["position"],
        error_x=_error_bar(heads, X) if bars else None,
        error_y=_error_bar(heads, Y) if bars else None,
        marker={
            "size": heads["size"],
            "color": NEEDS[verdict],
            "symbol": _SYMBOLS.get(verdict, "circle"),
            "opacity": 0.85,
            "line": _OUTLINE if verdict in _SYMBOLS else None,
        },
        customdata=pd.concat([heads["name"], values], axis=1),
        hovertemplate=f"%{{customdata[0]}}: {text}{note}<extra></extra>",
        cliponaxis=False,
    )


def _error_bar(heads: pd.DataFrame, name: str) -> dict[str, Any] | None:
    """Return the error bar of a part, of one standard error, from 0 to 1 at most; None without errors."""
    if f"{name}_se" not in heads:
        return None
    middle, error = heads[name], heads[f"{name}_se"]
    up, down = (middle + error).clip(0, 1) - middle, middle - (middle - error).clip(0, 1)
    return {"type": "data", "array": up, "arrayminus": down, "thickness": 1.5}


def outlines(heads: pd.DataFrame) -> list[go.Scatter]:
    """Draw a black outline of the marker of each head of large ``joint``: discs, then others; one has a legend."""
    heads = heads[heads["joint"] > _JOINT] if "joint" in heads else heads[:0]
    name, options = f"joint above {_JOINT}", {"mode": "markers", "hoverinfo": "skip", "cliponaxis": False}
    traces = list[go.Scatter]()
    for symbol, some in heads.groupby(heads["verdict"].map(_SYMBOLS).fillna("circle")):
        marker = {
            "symbol": f"{symbol}-open",
            "size": some["size"] + _LINE,
            "color": BLACK,
            "opacity": 1,
            "line": {"width": _LINE},
        }
        only_first: Any = {"legendgroup": name, "showlegend": not traces}
        traces.append(go.Scatter(x=some[X], y=some[Y], name=name, marker=marker, **only_first, **options))
    return traces


def crosses(heads: pd.DataFrame) -> go.Scatter:
    """Draw the heads of random copies that are used, as grey crosses."""
    used = heads[heads["verdict"] != "not used"]
    marker = {"symbol": "x-thin", "size": 6, "line": {"color": GREY, "width": 1}}
    return go.Scatter(x=used[X], y=used[Y], mode="markers", name="random weights", marker=marker, hoverinfo="skip")


def arrows(before: pd.DataFrame, after: pd.DataFrame) -> go.Scatter:
    """Draw an arrow from the place of each head that moved to its place after, with the colour of its verdict there."""
    starts, ends = (table[[X, Y]].to_numpy(dtype=float) for table in (before, after))
    used = [table["verdict"].to_numpy() != "not used" for table in (before, after)]
    moved = (np.linalg.norm(ends - starts, axis=1) >= _MOVED) & used[0] & used[1]
    gap = np.full_like(starts, np.nan)
    x, y = np.stack([starts, ends, gap], axis=1)[moved].reshape(-1, 2).T
    heads = [colour for verdict in after["verdict"][moved] for colour in (GREY, NEEDS[verdict], GREY)]
    marker = {"symbol": "arrow", "angleref": "previous", "size": [0, 10, 0] * int(moved.sum()), "color": heads}
    return go.Scatter(
        x=x,
        y=y,
        mode="lines+markers",
        name="after",
        line={"color": GREY, "width": 1},
        marker=marker,
        hoverinfo="skip",
        cliponaxis=False,
    )


def _hover(heads: pd.DataFrame, first: int) -> tuple[pd.DataFrame, str]:
    """Return the values of the hover text, and the text, which names them by their places from ``first`` on."""
    numbers = [name for name in _HOVER if name in heads]
    errors = [f"{name}_se" for name in numbers if f"{name}_se" in heads]
    words = heads["verdict"].astype(str)
    if "open" in heads:
        words += [f" ({said})" if pd.notna(said) and said else "" for said in heads["open"]]  # files have NaN for ""
    if "measured" in heads:
        words += ", " + heads["measured"]
    digits = {name: 6 if name.startswith("contribution") else 4 for name in (*numbers, *errors)}
    values = heads[[*digits]].round(digits).assign(words=words)  # digits are most of the size of a figure
    place = {name: f"customdata[{first + n}]" for n, name in enumerate(values)}
    lines = [f"%{{{place['words']}}}"]
    for name in numbers:
        title, style = _HOVER[name]
        fields = [f"%{{{place[x]}:{style}}}" for x in (name, f"{name}_se") if x in place]
        lines.append(f"{title} {' ± '.join(fields)}")
    return values, "<br>".join(lines)
