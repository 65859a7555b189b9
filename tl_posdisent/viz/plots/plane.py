"""The where–what plane: what the contribution of each head needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from tl_posdisent.utils.validation import check_integer, head_label
from tl_posdisent.viz.palette import GREY, NEEDS
from tl_posdisent.viz.plots.tables import add_title, check_table

_LARGEST = 34.0  # diameter of the head of largest contribution, in pixels
_LEAST = 5.0
_CORNERS = {
    (0.0, -0.03, "left", "top"): "both together",
    (1.0, -0.03, "right", "top"): "where",
    (0.0, 1.06, "left", "bottom"): "what",
    (1.0, 1.06, "right", "bottom"): "either, or the pattern does not matter",
}


def plot_where_or_what(table: pd.DataFrame, *, labels: int = 10, title: str | None = None) -> go.Figure:
    """Plot each head by the share of its contribution that survives with distances alone (x) and content alone (y).

    Each quarter of the plane is a verdict of ``where_or_what``. The area of a marker is proportional to the head's
    contribution; markers of undecided heads are hollow. Hovering shows the numbers with their errors.

    Args:
        table: table of ``where_or_what``.
        labels: how many heads of the largest contribution are labelled.
        title: title of the figure; default a description with the number of heads per verdict.

    Raises:
        ValueError: a table without these columns or rows; labels that are not an integer from 0 on.

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
    known = table[table["where"].notna() & table["what"].notna()]
    names = [head_label(layer, head) for layer, head in zip(known["layer"], known["head"], strict=True)]
    shown = known["contribution"].rank(ascending=False, method="first") <= labels
    points = known.assign(
        name=names,
        label=[name if here else "" for name, here in zip(names, shown, strict=True)],
        size=(known["contribution"] / known["contribution"].max()).clip(0, 1) ** 0.5 * _LARGEST,
        hover=[_hover(row) for row in known.to_dict("records")],
    )
    figure = go.Figure([_markers(points[points["verdict"] == verdict], verdict) for verdict in _present(points)])
    for (x, y, across, up), text in _CORNERS.items():
        figure.add_annotation(x=x, y=y, text=text, xanchor=across, yanchor=up, showarrow=False)
    for line in ({"x0": 0.5, "x1": 0.5, "y0": 0, "y1": 1}, {"x0": 0, "x1": 1, "y0": 0.5, "y1": 0.5}):
        figure.add_shape(type="line", **line, line={"color": GREY, "dash": "dot", "width": 1}, layer="below")
    axis = {"tickformat": ".0%", "zeroline": False}
    figure.update_layout(
        xaxis={"title": "where: share that survives with distances alone", "range": [-0.04, 1.04], **axis},
        yaxis={"title": "what: share that survives with content alone", "range": [-0.11, 1.13], **axis},
        legend={"title": "verdict", "itemsizing": "constant"},
    )
    counted = ", ".join(f"{(table['verdict'] == verdict).sum()} {verdict}" for verdict in _present(table))
    return add_title(figure, title, "What the contribution of each head needs", counted)


def _present(table: pd.DataFrame) -> list[str]:
    """Return the verdicts of a table in the order of the legend."""
    return [verdict for verdict in NEEDS if (table["verdict"] == verdict).any()]


def _markers(heads: pd.DataFrame, verdict: str) -> go.Scatter:
    return go.Scatter(
        x=heads["where"],
        y=heads["what"],
        mode="markers+text",
        name=verdict,
        text=heads["label"],
        textposition="top center",
        marker={
            "size": heads["size"].clip(lower=_LEAST),
            "color": NEEDS[verdict],
            "symbol": "circle-open" if verdict == "undecided" else "circle",
            "opacity": 0.75,
        },
        customdata=heads[["name", "hover"]],
        hovertemplate="%{customdata[0]}: %{customdata[1]}<extra></extra>",
        cliponaxis=False,
    )


def _hover(head: Mapping[Any, Any]) -> str:
    """Describe a head: verdict, shares without clipping and contribution, with errors if the table has them."""
    parts = [str(head["verdict"])]
    for name in ("where", "what"):
        error = f" ± {head[f'{name}_se']:.2f}" if f"{name}_se" in head else ""
        parts.append(f"{name} {head.get(f'{name}_unclipped', head[name]):.2f}{error}")
    error = f" ± {head['contribution_se']:.2g}" if "contribution_se" in head else ""
    parts.append(f"contribution {head['contribution']:.2g}{error} nats per token")
    return ", ".join(parts) + (" (± standard error over texts)" if "where_se" in head else "")
