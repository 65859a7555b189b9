"""The map of the atlas, and what a reader can choose to see in it: colours and axes, all computed here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from tl_posdisent.page.drawing.maps import UNKNOWN, frame_cells, grey_cells, name_layers
from tl_posdisent.page.drawing.markup import remove_cell_text
from tl_posdisent.utils.validation import head_label
from tl_posdisent.viz.palette import BLACK, GREY, NEEDS
from tl_posdisent.viz.plots.heatmaps import bar_title, category_map, plot_heads, plot_verdicts
from tl_posdisent.viz.plots.tables import whole

_COLOURS = {
    "where": "where (share that survives with distances alone)",
    "what": "what (share that survives with content alone)",
    "contribution": "contribution (nats per token)",
    "share_distance": "distance alone (share of variance)",
    "share_key": "key alone (share of variance)",
    "r_held_out": "held-out r",
    "r": "r",
    "effect": "added loss (nats per token)",
}
_SIGNED = ("effect",)
_MARKS = {"undecided": "line-ne", "not used": "line-ew"}
"""The mark in the cells of a verdict, which is not told by its colour alone."""


def choices(heads: pd.DataFrame) -> dict[str, Any]:
    """Return what the page's script chooses from: for each measure a map, the colours of points, and numbers for axes.

    ``heads`` is the table of the atlas; numbers are in the order of its rows, null where there are none. The verdicts
    of ``where_or_what`` are first; without any, all cells are grey.
    """
    names = [name for name in _COLOURS if name in heads and heads[name].notna().any()]
    colours = {"verdict": _need_colours(heads)} | {name: _number_colours(heads, name) for name in names}
    if "ladder" in heads and heads["ladder"].notna().any():
        colours["ladder"] = _ladder_colours(heads)
    axes = {name: {"title": _COLOURS[name], "values": _numbers(heads[name])} for name in names}
    labels = [head_label(int(layer), int(head)) for layer, head in zip(heads["layer"], heads["head"], strict=True)]
    for colour in colours.values():
        colour["caption"] = map_caption(colour["title"], heads, colour["values"].count(None))
    return {"colours": colours, "axes": axes, "labels": labels, "unknown": UNKNOWN}


def map_caption(title: str, heads: pd.DataFrame, missing: int) -> str:
    """Name the colour of a map of all heads in the table of the atlas, and say how many cells have none."""
    cells = heads["layer"].nunique() * heads["head"].nunique()
    return f"{title}, by head{grey_cells(missing, cells - len(heads))}"


def map_figure(
    heads: pd.DataFrame, options: dict[str, Any], hover_texts: Sequence[str], attention: dict[int, str]
) -> go.Figure:
    """Draw the map that is shown first, that of the first choice; its hover texts are those of all others."""
    (first, *_) = options["colours"].values()
    drawn = go.Figure(first["map"])
    grid = heads.assign(hover=hover_texts).pivot(index="layer", columns="head", values="hover").fillna("")
    drawn.update_traces(customdata=grid.to_numpy(), selector={"type": "heatmap"})
    drawn.update_xaxes(title="head", type="category").update_yaxes(title="layer", type="category")
    frame_cells(drawn, *grid.shape)
    layers = [int(layer) for layer in sorted(heads["layer"].unique())]
    return name_layers(drawn, layers, attention).update_layout(plot_bgcolor=UNKNOWN)


def _need_colours(heads: pd.DataFrame) -> dict[str, Any]:
    """Colour heads by their verdict; undecided and unused ones are marked as well."""
    verdicts = heads["verdict"] if "verdict" in heads else pd.Series(None, heads.index, dtype=object)
    names = [name for name in NEEDS if (verdicts == name).any()]
    codes = [None if pd.isna(verdict) else names.index(verdict) for verdict in verdicts]
    cells = heads[["layer", "head"]].assign(code=pd.array(codes, dtype="Float64"))
    grid = cells.pivot(index="layer", columns="head", values="code")
    heat = category_map(grid, names, [NEEDS[name] for name in names]).update(showscale=bool(names))
    marks = [_marks(heads[verdicts == name], name, symbol) for name, symbol in _MARKS.items() if name in names]
    return _choice("What the contribution needs", heat, codes, marks)


def _marks(heads: pd.DataFrame, name: str, symbol: str) -> go.Scatter:
    """Mark the cells of these heads by a line."""
    marker = {"symbol": symbol, "size": 11, "color": BLACK, "line": {"color": BLACK, "width": 1.5}}
    x, y = whole(heads["head"]), whole(heads["layer"])
    return go.Scatter(x=x, y=y, mode="markers", marker=marker, name=name, showlegend=True, hoverinfo="skip")


def _number_colours(heads: pd.DataFrame, name: str) -> dict[str, Any]:
    drawn = _with_title(plot_heads(heads, name, signed=name in _SIGNED), _COLOURS[name])
    (heat,) = drawn.data
    return _choice(_COLOURS[name], heat, _numbers(heads[name]))


def _ladder_colours(heads: pd.DataFrame) -> dict[str, Any]:
    known = heads.dropna(subset="ladder")
    (heat,) = plot_verdicts(known.assign(verdict=known["ladder"])).data
    layers, columns = (whole(sorted(heads[name].unique())) for name in ("layer", "head"))
    grid = pd.DataFrame(heat.z, heat.y, heat.x).reindex(index=layers, columns=columns)  # known may lack some of them
    heat.update(z=grid.to_numpy(), y=layers, x=columns)
    codes = dict(zip(heat.colorbar.ticktext, heat.colorbar.tickvals, strict=True))
    return _choice("verdict of the ladder", heat, [None if pd.isna(kind) else codes[kind] for kind in heads["ladder"]])


def _choice(title: str, heat: go.Heatmap, values: list[Any], marks: Sequence[go.Scatter] = ()) -> dict[str, Any]:
    """Return the traces of a map, the same colours for points, and the number behind each head's colour."""
    heat.update(hovertemplate="%{customdata}<extra></extra>", customdata=None)
    remove_cell_text(heat)
    traces = json.loads(go.Figure([heat, *marks]).to_json())["data"]
    scale = {
        "colorscale": heat.colorscale,
        "cmin": heat.zmin,
        "cmax": heat.zmax,
        "colorbar": heat.colorbar.to_plotly_json(),
        "showscale": heat.showscale,
    }
    line = {"color": GREY, "width": 0.5}
    marker = json.loads(go.Figure(go.Scatter(marker={**scale, "size": 9, "line": line})).to_json())["data"][0]["marker"]
    return {"title": title, "map": traces, "marker": marker, "values": values}


def _with_title(drawn: go.Figure, title: str) -> go.Figure:
    return drawn.update_traces(colorbar_title_text=bar_title(title))


def _numbers(values: pd.Series) -> list[float | None]:
    return [None if pd.isna(x) else float(f"{x:.6g}") for x in values]
