"""The heads of the where–what plane: their rows checked, and drawn as markers, rings, crosses and arrows."""

from __future__ import annotations

from collections.abc import Mapping
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
_PARTS: Final = (X, Y, "neither_part")
_HOVER: Final = ("joint", "kept_distance", "kept_content", "kept_uniform", "gate")
"""Columns in the hover text beside the parts and the contribution, of those that a table has."""
_JOINT: Final = 0.3
"""Heads of ``joint`` above this have a ring."""
_MOVED: Final = 0.04
"""Distance in the plane from which an arrow joins the places of a head in two models."""
_LARGEST = 34.0  # diameter of the head of largest contribution, in pixels
_LEAST = 5.0
_ALONE = 10.0  # diameter of a single head, from which its error bars stand out
_WIDER = 3.0  # by how much a ring is wider than its marker, in pixels


def drawable(table: Any, name: str, *, several: bool = False) -> pd.DataFrame:
    """Return the table, or raise unless it has the columns that are drawn, and one row for each head or group.

    Args:
        name: of the argument.
        several: accept several rows for a head.
    """
    index = ["group"] if "group" in getattr(table, "columns", ()) else HEAD
    with naming(table=name):
        checked = check_table(table, [*index, "verdict"], [*_PARTS, "contribution"], "where_or_what")
        repeated = checked[checked.duplicated(index)]
        if len(repeated) and not several:
            raise ArgumentError(
                "table",
                f"must have one row for each {' and '.join(index)}, got several for {row_names(repeated)[0]}: select "
                "the rows of one model, or draw a figure for each",
            )
    return checked


def same_heads(after: pd.DataFrame, before: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of ``after`` in the order of ``before``, or raise unless both have the same heads."""
    own, wanted = row_names(after), row_names(before)
    if missing := [name for name in wanted if name not in own]:
        raise ArgumentError("after", f"must have the heads of table, got one without {missing[0]}")
    if more := [name for name in own if name not in wanted]:
        raise ArgumentError("after", f"must have the heads of table, got one with {more[0]} as well")
    return after.iloc[[own.index(name) for name in wanted]]


def present(table: pd.DataFrame) -> list[str]:
    """Return the verdicts of a table in the order of the legend."""
    return [verdict for verdict in NEEDS if (table["verdict"] == verdict).any()]


def points_of(table: pd.DataFrame, after: pd.DataFrame | None) -> pd.DataFrame:
    """Return the heads that have parts, those that contribute most first, with name and hover text.

    ``size`` is the diameter of the marker, ``outer`` that of its ring, if it has one.
    """
    texts = [_hover(row) for row in table.to_dict("records")]
    if after is not None:
        rows = after.to_dict("records")
        texts = [f"{text}<br>after: {_hover(row)}" for text, row in zip(texts, rows, strict=True)]
    note = "<br>(± standard error over texts)" if f"{X}_se" in table else ""
    largest = _ALONE if len(table) == 1 else _LARGEST
    size = ((table["contribution"] / table["contribution"].max()).clip(0, 1) ** 0.5 * largest).clip(lower=_LEAST)
    outer = size + (_WIDER * (table["joint"] > _JOINT) if "joint" in table else 0)
    points = table.assign(name=row_names(table), size=size, outer=outer, hover=[text + note for text in texts])
    return points.dropna(subset=[X, Y]).sort_values("contribution", ascending=False, kind="stable")


def markers(heads: pd.DataFrame, verdict: str, *, bars: bool) -> go.Scatter:
    """Draw the heads of one verdict, with their labels and, if asked for, their errors."""
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
            "symbol": "circle-open" if verdict == "undecided" else "circle",
            "opacity": 0.75,
        },
        customdata=heads[["name", "hover"]],
        hovertemplate="%{customdata[0]}: %{customdata[1]}<extra></extra>",
        cliponaxis=False,
    )


def _error_bar(heads: pd.DataFrame, name: str) -> dict[str, Any] | None:
    """Return the error bar of a part, of one standard error, from 0 to 1 at most; None without errors."""
    if f"{name}_se" not in heads:
        return None
    middle, error = heads[name], heads[f"{name}_se"]
    up, down = (middle + error).clip(0, 1) - middle, middle - (middle - error).clip(0, 1)
    return {"type": "data", "array": up, "arrayminus": down, "thickness": 1.5}


def rings(heads: pd.DataFrame) -> go.Scatter:
    """Draw a ring around the marker of each of these heads."""
    marker = {"symbol": "circle-open", "size": heads["outer"], "color": BLACK, "line": {"width": 1.5}}
    return go.Scatter(
        x=heads[X],
        y=heads[Y],
        mode="markers",
        name=f"joint above {_JOINT}",
        marker=marker,
        hoverinfo="skip",
        cliponaxis=False,
    )


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


def _hover(head: Mapping[Any, Any]) -> str:
    """Describe a head in lines: verdict, parts, what each replacement keeps, and contribution, with their errors."""
    is_open = pd.notna(head.get("open")) and head["open"]  # files have NaN for what is empty
    first = f"{head['verdict']} ({head['open']})" if is_open else str(head["verdict"])
    where, what, neither = (_with_error(head, name, "{:.0%}") for name in _PARTS)
    size = f"{_with_error(head, 'contribution', '{:.2g}')} nats per token"
    lines = [first, f"where {where}, what {what}", f"neither {neither}"]
    lines += [f"{name.replace('_', ' ')} {_with_error(head, name, '{:.2f}')}" for name in _HOVER if name in head]
    lines += [size + (f", {head['measured']}" if "measured" in head else "")]
    return "<br>".join([*lines, *([str(head["heads"])] if "heads" in head else [])])


def _with_error(head: Mapping[Any, Any], name: str, style: str) -> str:
    """Format a number of a head, with its standard error over texts if the table has it."""
    error = f" ± {style.format(head[f'{name}_se'])}" if f"{name}_se" in head else ""
    return style.format(head[name]) + error
