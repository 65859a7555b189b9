"""Heat maps: a number or a verdict per head, or a number per subspace of each head."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_choice
from tl_posdisent.viz.palette import GREY, SEQUENTIAL, SKY, VERDICTS, diverging, faint

from .tables import (
    add_title,
    check_table,
    head_index,
    mean_over_texts,
    title_of,
    whole,
    without_unit,
)

_WRITTEN = 160
"""Largest number of cells in which numbers are shown."""
_MAX_TICK_LABELS = 48  # largest number of heads with a tick label each, which are 10 pixels apart
_MAX_TITLE_LINE = 16  # largest number of characters of a line above a colour bar


def plot_heads(
    table: pd.DataFrame,
    value: str,
    *,
    by: Literal["head", "layer"] = "head",
    signed: bool | None = None,
    limits: tuple[float | int, float | int] | None = None,
    title: str | None = None,
) -> go.Figure:
    """Plot a number for each head of a model: layers on y, the first at the top, heads on x.

    Args:
        table: a table with the columns ``layer``, ``head`` and ``value``, one row per layer and head, or per text,
            layer and head (column ``batch``), which is averaged over texts.
        value: the column to draw. NaN is left blank; hovering shows the standard error of a column ``<value>_se``.
        by: ``"layer"`` draws the mean over the heads of each layer as a line, and the range from the lowest to the
            highest head as a band.
        signed: whether to use a diverging colour scale, white at 0. Default: if a value is negative.
        limits: limits of the colour scale; default the lowest and the highest value, or symmetric about 0 for a
            diverging scale.
        title: title of the figure; default names the measure.

    Raises:
        ValueError: a table without these columns or rows; several rows for a head; limits that are not ascending.

    Example:
        >>> from tl_posdisent import additivity, demo_tokens, load_demo_model, plot_heads
        >>> table = additivity(load_demo_model(), demo_tokens(length=64), progress=False)
        >>> figure = plot_heads(table, "r")
        >>> r = table.query("layer == 4 and head == 2")["r"].item()
        >>> float(figure.data[0].z[4][2]) == r > 0.8
        True
    """
    check_choice("by", by, ("head", "layer"))
    index = ["layer", "head"]
    table = check_table(table, index, [value], "additivity, controlled_distance or head_ablation")
    means = mean_over_texts(table, index, [value])
    if by == "layer":
        return _layers(means.groupby("layer")[value], limits, title_of(value, table), title)
    grid = means.pivot(index="layer", columns="head", values=value)
    heat = _heat_map(grid, title_of(value, table), signed, limits)
    heat.update(x=whole(grid.columns), y=whole(grid.index), hovertemplate="layer %{y}, head %{x}: %{z:.4g}")
    error = f"{value}_se"
    if error in table and not table.duplicated(["layer", "head"]).any():
        errors = table.pivot(index="layer", columns="head", values=error)
        heat.update(
            customdata=errors.to_numpy(dtype=float),
            hovertemplate=heat.hovertemplate + " ± %{customdata:.2g} (standard error)",
        )
    figure = add_title(go.Figure(heat), title, f"{without_unit(title_of(value, table))}, by layer and head")
    return _as_map(figure, "head", "layer")


def _layers(heads: Any, limits: Any, axis: str, title: str | None) -> go.Figure:
    """Draw a line through the means of the heads, grouped by layer, and a band from the lowest to the highest head."""
    low, high, mean = heads.min(), heads.max(), heads.mean()
    edge: dict[str, Any] = {"line": {"width": 0}, "mode": "lines", "hoverinfo": "skip"}
    figure = go.Figure().add_scatter(x=mean.index, y=low, name="lowest", showlegend=False, **edge)
    figure.add_scatter(
        x=mean.index, y=high, name="lowest to highest head", fill="tonexty", fillcolor=faint(SKY), **edge
    )
    figure.add_scatter(
        x=mean.index,
        y=mean,
        name="mean over heads",
        customdata=np.stack([low, high], 1),
        hovertemplate="layer %{x}: %{y:.4g}, heads from %{customdata[0]:.4g} to %{customdata[1]:.4g}",
        line={"color": SKY},
        mode="lines+markers",
    )
    figure.update_yaxes(title=axis.replace(" (", "<br>("), range=None if limits is None else _limits(limits))
    return add_title(figure.update_xaxes(title="layer"), title, f"{without_unit(axis)}, by layer")


def plot_subspaces(
    table: pd.DataFrame,
    value: str = "key_concentration",
    *,
    signed: bool | None = None,
    limits: tuple[float | int, float | int] | None = None,
    title: str | None = None,
) -> go.Figure:
    """Plot a number for each rotary subspace of each head: subspaces on y, in their order in the model, heads on x.

    Args:
        table: a table with the columns ``subspace``, ``frequency`` and ``value``, and ``head`` or ``layer`` or both:
            from ``subspace_patterns``. Subspaces are named by their wavelength in positions, or by number if layers
            differ in frequencies.
        value: the column to draw, such as ``"key_size"``, ``"key_concentration"``, ``"distance"`` or ``"semantic"``.
        signed, limits, title: as in ``plot_heads``.

    Raises:
        ValueError: as ``plot_heads``; several rows for a subspace of a head.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model, subspace_patterns
        >>> from tl_posdisent.viz import plot_subspaces
        >>> table = subspace_patterns(load_demo_model(), demo_tokens(length=64), progress=False)
        >>> figure = plot_subspaces(table, "key_concentration")
        >>> row = table.query("layer == 3 and head == 1 and subspace == 6")
        >>> float(figure.data[0].z[6][3 * 8 + 1]) == row["key_concentration"].item() > 0.5
        True
    """
    index = head_index(table) or ["head"]
    table = check_table(table, index, ["subspace", "frequency", value], "subspace_patterns")
    means = mean_over_texts(table, [*index, "subspace"], [value, "frequency"])
    grid = means.pivot(index="subspace", columns=index, values=value)
    heat = _heat_map(grid, title_of(value, table), signed, limits, room=0)
    names, heads = _wavelengths(means), grid.columns.to_frame(index=False)
    heat.update(
        x=head_axis(heads),
        y=whole(grid.index),
        customdata=[[(head, name) for head in head_names(heads)] for name in names],
        hovertemplate="%{customdata[0]}, wavelength %{customdata[1]}: %{z:.4g}",
    )
    figure = add_title(go.Figure(heat), title, f"{without_unit(title_of(value, table))}, by wavelength and head")
    by_number, step = names == whole(grid.index), -(-len(names) // 16)
    figure.update_yaxes(
        title="subspace" if by_number else "wavelength (positions)",
        type="category",
        tickvals=whole(grid.index)[::step],
        ticktext=names[::step],
        autorange="reversed",
    )
    return figure.update_xaxes(**head_ticks(heads))


_LETTERS = {"not used": "·", "no effect": "–", "undecided": "?"}


def plot_verdicts(table: pd.DataFrame, *, title: str | None = None) -> go.Figure:
    """Plot the verdict of each head: layers on y, the first at the top, heads on x.

    Below the letter of a verdict is the share of the divergence of predictions that the rung of that name recovers.
    Hovering shows the gap.

    Args:
        table: table of ``head_verdicts``.
        title: title of the figure; default a description with the number of heads per verdict.

    Raises:
        ValueError: a table without these columns or rows; several rows for a head.

    Example:
        >>> import pandas as pd
        >>> from tl_posdisent.viz import plot_verdicts
        >>> verdicts = pd.DataFrame(
        ...     {"layer": [0, 0], "head": [0, 1], "verdict": ["static", "no effect"], "gap": [0.2, 0.0]}
        ... )
        >>> plot_verdicts(verdicts).data[0].text.tolist()
        [['S', '–']]
    """
    table = check_table(table, ["layer", "head", "verdict"], ["gap"], "head_verdicts")
    index = ["layer", "head"]
    mean_over_texts(table, index, ["gap"])  # raises for a row without head, or several rows for one head
    verdicts = table["verdict"].astype(str)
    names = [name for name in VERDICTS if name in set(verdicts)] + sorted(set(verdicts) - set(VERDICTS))
    cells = table[["layer", "head"]].assign(
        number=verdicts.map(names.index),
        letter=[_LETTERS.get(name, name[0].upper()) for name in verdicts],
        hover=_verdict_texts(table),
    )
    if "recovered" in table and "simplest" in table:
        known = ~table["simplest"].isin(["mean_output", "uniform", "untouched"])  # no share, or 0 or 1
        cells["letter"] += [
            f"<br>{x:.0%}" if is_known else "" for x, is_known in zip(table["recovered"], known, strict=True)
        ]
    grids = cells.pivot(index="layer", columns="head")
    codes: Any = grids["number"]  # a table
    heat = category_map(codes, names, [VERDICTS.get(name, GREY) for name in names]).update(
        text=grids["letter"].fillna("").to_numpy(),
        texttemplate="%{text}" if codes.size <= _WRITTEN else None,
        customdata=grids["hover"].fillna("").to_numpy(),
        hovertemplate="layer %{y}, head %{x}: %{customdata}",
    )
    counted = ", ".join(f"{(verdicts == name).sum()} {name}" for name in names)
    figure = add_title(go.Figure(heat), title, "What the predictions need of each head's attention", counted)
    return _as_map(figure, "head", "layer")


def category_map(codes: pd.DataFrame, names: Sequence[str], colours: Sequence[str]) -> go.Heatmap:
    """Colour a grid of layers and heads by verdict: ``codes`` has the place of each cell's verdict in ``names``."""
    n = max(1, len(names))
    return go.Heatmap(
        x=whole(codes.columns),
        y=whole(codes.index),
        z=codes.to_numpy(dtype=float, na_value=float("nan")),
        zmin=-0.5,
        zmax=n - 0.5,
        colorscale=[((k + part) / n, colour) for k, colour in enumerate(colours) for part in (0, 1)] or None,
        colorbar={"title": "verdict", "tickvals": list(range(len(names))), "ticktext": names},
        name="",
    )


def _verdict_texts(table: pd.DataFrame) -> list[str]:
    """Describe each head of ``head_verdicts``: verdict and gap."""
    missing = [float("nan")] * len(table)
    between = table.get("between", pd.Series("", table.index)).fillna("")  # empty cells of a CSV file are read as NaN
    verdicts = table["verdict"].where(between == "", table["verdict"] + " between " + between)
    return [
        f"{verdict}<br>gap {gap:.3g}{'' if pd.isna(se) else f' ± {se:.2g} (standard error)'} nats per token"
        for verdict, gap, se in zip(verdicts, table["gap"], table.get("error", missing), strict=True)
    ]


def _as_map(figure: go.Figure, x: str, y: str) -> go.Figure:
    """Title the axes of a map of categories, with the first row at the top."""
    figure.update_xaxes(title=x, type="category", showgrid=False)
    return figure.update_yaxes(title=y, type="category", autorange="reversed", showgrid=False)


def head_axis(heads: pd.DataFrame) -> list[Any]:
    """Return the x values of heads or layers: categories, grouped by layer, or numbers if there are too many heads."""
    if _crowded(heads):
        return list(range(len(heads)))
    if len(index := head_index(heads)) == 1:
        return whole(heads[index[0]])
    return [[f"layer {layer}" for layer in whole(heads["layer"])], whole(heads["head"])]


def head_ticks(heads: pd.DataFrame) -> dict[str, Any]:
    """Choose tick labels: all heads, or the middle of each layer if there are too many."""
    if not _crowded(heads):
        return {"title": head_index(heads)[-1], "showgrid": False}
    middle = pd.Series(range(len(heads))).groupby(heads["layer"].to_numpy()).mean()
    ticks = {"tickvals": middle.tolist(), "ticktext": whole(middle.index)}
    return {"title": "layer, its heads side by side", "showgrid": False, **ticks}


def _crowded(heads: pd.DataFrame) -> bool:
    return len(head_index(heads)) == 2 and len(heads) > _MAX_TICK_LABELS


def head_names(heads: pd.DataFrame) -> list[str]:
    columns = [[f"{name} {number}" for number in whole(heads[name])] for name in head_index(heads)]
    return [", ".join(names) for names in zip(*columns, strict=True)]


def _heat_map(grid: pd.DataFrame, title: str, signed: bool | None, limits: Any, room: int = _WRITTEN) -> go.Heatmap:
    """Colour a grid of numbers; in a small one they are written."""
    z = grid.to_numpy(dtype=float, na_value=np.nan)
    known = z[~np.isnan(z)] if (~np.isnan(z)).any() else np.zeros(1)
    low, high = float(known.min()), float(known.max())
    signed = low < 0 if signed is None else signed
    if limits is not None:
        low, high = _limits(limits)
    elif signed:
        high = max(-low, high) or 1.0
        low = -high
    elif low == high:
        high = low + 1.0
    return go.Heatmap(
        z=z,
        zmin=low,
        zmax=high,
        colorscale=diverging(low, high) if signed else SEQUENTIAL,
        colorbar={"title": {"text": _bar_title(title), "side": "top"}},
        texttemplate=f"%{{z:.{max(2, 1 - math.floor(math.log10(high)))}f}}" if z.size <= room and high > 0 else None,
        name="",
    )


def _bar_title(title: str) -> str:
    """Break the title of a colour bar into short lines. It stands above the bar: beside it, it would cover the ticks.

    >>> _bar_title("what − where over random (share of variance)")
    'what − where<br>over random<br>(share of<br>variance)'
    """
    lines = (
        textwrap.wrap(part, _MAX_TITLE_LINE, break_long_words=False) for part in title.replace(" (", "\n(").split("\n")
    )
    return "<br>".join(line for part in lines for line in part)


def _limits(limits: Any) -> tuple[float, float]:
    try:
        low, high = (float(x) for x in (() if isinstance(limits, (str, bytes)) else limits))
    except (TypeError, ValueError):
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ArgumentError("limits", f"must be two ascending numbers, got {limits!r}")
    return low, high


def _wavelengths(subspaces: pd.DataFrame) -> list[str]:
    """Name the subspaces, in ascending order, by their wavelengths if these are the same in all layers."""
    frequencies = subspaces.groupby("subspace")["frequency"].agg(["min", "max"])
    if not np.allclose(frequencies["min"], frequencies["max"], rtol=1e-6, atol=0):
        return whole(frequencies.index)
    return ["∞" if theta == 0 else f"{2 * math.pi / abs(theta):.0f}" for theta in frequencies["min"]]
