"""Line charts over distances, perturbed fractions, and positions of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tl_posdisent.additive.attention.result import AttentionFit
from tl_posdisent.additive.result import AdditiveFit
from tl_posdisent.experiments.robustness.perturbation_curve import lower_and_higher
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_flag, check_integer
from tl_posdisent.utils.words import plural
from tl_posdisent.viz.palette import GREY, HUES, faint, line_style

from .tables import (
    add_title,
    check_table,
    head_index,
    mean_over_texts,
    title_of,
    without_unit,
)

_MAX_EXACT_DISTANCE = 32  # largest distance that is drawn without averaging
_SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x")


def plot_distance(
    profiles: AdditiveFit | AttentionFit | pd.DataFrame,
    *,
    wavelengths: Sequence[float] | None = None,
    value: str = "value",
    top: int = 8,
    log: bool | None = None,
    title: str | None = None,
) -> go.Figure:
    """Plot the distance component of each head's scores; the heads whose component varies most are in colour.

    Beyond distance 32 the lines are means over an eighth of an octave, weighted by the column ``cells`` if there is
    one.

    Args:
        profiles: an ``AdditiveFit`` or ``AttentionFit``; or a table with ``distance`` and ``value`` by ``layer`` and
            ``head``: as from ``AdditiveFit.to_frame("distance")``. Several texts are averaged.
        wavelengths: wavelengths of RoPE, in positions, to mark by dotted lines.
        value: the column to draw.
        top: largest number of heads in colour, those whose profile varies most. The others are grey.
        log: whether the axis is logarithmic, in 1 + distance; default True if no distance is negative.
        title: title of the figure; default a description.

    Raises:
        ValueError: invalid arguments; several rows for a distance of a head; ``log`` with negative distances.

    Example:
        >>> from tl_posdisent import demo_tokens, fit_additive, load_demo_model, plot_distance, read_model
        >>> model = load_demo_model()
        >>> _, cache = model.run_with_cache(demo_tokens(length=128))
        >>> fit = fit_additive(cache["attn_scores", 3])
        >>> wavelengths = read_model(model).specs(3)[0].rotary.wavelengths.tolist()
        >>> figure = plot_distance(fit, wavelengths=wavelengths, log=False)
        >>> figure.data[5].name, figure.data[8].name, bool(figure.data[5].y[20] == fit.distance[0, 5, 20])
        ('head 5', 'wavelengths', True)
    """
    check_integer("top", top, 1)
    table = profiles.to_frame("distance") if isinstance(profiles, (AdditiveFit, AttentionFit)) else profiles
    table = check_table(table, [], ["distance", value], 'AdditiveFit.to_frame("distance")')
    heads = head_index(table)
    columns = [value, *(["cells"] if "cells" in table else [])]
    means = mean_over_texts(table, [*heads, "distance"], columns)
    distances = means["distance"]
    if log is not None:
        check_flag("log", log)
    logarithmic = bool(distances.min() >= 0) if log is None else log
    if logarithmic and distances.min() < 0:
        raise ArgumentError(
            "log",
            f"must be False or None for negative distances, got distances from {int(distances.min())} "
            "(these heads attend in both directions)",
        )
    lines: dict[str, pd.DataFrame] = {}
    groups: Any = means.groupby(heads) if heads else [((), means)]
    for which, rows in groups:
        lines[", ".join(f"{column} {int(i)}" for column, i in zip(heads, which, strict=True))] = rows
    spread = {name: float(rows[value].std(ddof=0)) for name, rows in lines.items()}
    ranked = sorted(lines, key=lambda name: -spread[name]) if len(lines) > top else list(lines)
    n_values, lines = len(means), {name: _neighbours_averaged(rows, value) for name, rows in lines.items()}
    figure, others = go.Figure(), [name for name in lines if name not in ranked[:top]]
    for name in others:
        style: dict[str, Any] = {"color": GREY, "width": 1}
        figure.add_trace(_profile(lines[name], value, logarithmic).update(line=style, opacity=0.45, hovertext=name))
        figure.data[-1].update(
            name=plural(len(others), "other head"), legendgroup="others", showlegend=name == others[0]
        )
    for number, name in enumerate(x for x in lines if x not in others):  # in the order of heads, as the legend is
        figure.add_trace(_profile(lines[name], value, logarithmic).update(line=line_style(number), name=name))
    if wavelengths is not None:
        figure.add_trace(_marks(wavelengths, distances, pd.concat(lines.values())[value], logarithmic))
    figure.update_layout(showlegend=len(figure.data) > 1)
    _distance_axis(figure, distances, logarithmic)
    named = "distance component<br>(units of the scores)" if value == "value" else title_of(value, table)
    figure.update_yaxes(title=named)
    note = f"In colour: the {top} of {len(lines)} {heads[-1]}s whose profile varies most" if others else ""
    if sum(map(len, lines.values())) < n_values:
        note += f"{'<br>' if note else ''}Beyond distance {_MAX_EXACT_DISTANCE}: means over neighbouring distances"
    default = "Distance component of the scores" if value == "value" else f"{without_unit(named)}, by distance"
    return add_title(figure, title, default, note).update_layout(margin_t=100 if "<br>" in note else 80)


def _distance_axis(figure: go.Figure, distances: pd.Series, logarithmic: bool) -> go.Figure:
    """Title the axis of distances, and label 0, 1, 2, 4 … if it is logarithmic, in 1 + distance."""
    figure.update_xaxes(title="distance, query − key (positions)")
    if logarithmic:
        ticks = [0, *(2**n for n in range(int(distances.max()).bit_length()))]
        figure.update_xaxes(type="log", tickvals=[d + 1 for d in ticks], ticktext=[str(d) for d in ticks])
    return figure


def _neighbours_averaged(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """Average a profile beyond distance 32 over an eighth of an octave, because few pairs are that far apart."""
    far = rows["distance"].abs() > _MAX_EXACT_DISTANCE
    if not far.any():
        return rows
    beyond = rows[far]
    octave = np.sign(beyond["distance"]) * np.floor(8 * np.log2(beyond["distance"].abs() / _MAX_EXACT_DISTANCE) + 1)
    cells = beyond["cells"] if "cells" in rows else pd.Series(1.0, beyond.index)
    totals = beyond[["distance", value]].mul(cells, axis=0).assign(cells=cells).groupby(octave).sum()
    means = totals[["distance", value]].div(totals["cells"], axis=0)
    return pd.concat([rows[~far], means]).sort_values("distance", ignore_index=True)


def _profile(rows: pd.DataFrame, value: str, logarithmic: bool) -> go.Scatter:
    distance = rows["distance"].to_numpy()
    x = distance + 1 if logarithmic else distance
    hover = "distance %{customdata:.4g}: %{y:.4g}"
    return go.Scatter(x=x, y=rows[value].to_numpy(), customdata=distance, hovertemplate=hover, mode="lines")


def _marks(wavelengths: Any, distances: Any, values: Any, logarithmic: bool) -> go.Scatter:
    """Draw a dotted vertical line per wavelength, with names where they fit; as a trace, for any type of axis."""
    try:
        inside = sorted({float(x) for x in wavelengths})
    except (TypeError, ValueError):
        inside = [-1.0]
    if any(not x > 0 for x in inside):
        raise ArgumentError("wavelengths", f"must be numbers above 0, got {wavelengths!r}")
    inside = [x for x in inside if distances.min() <= x <= distances.max()]
    low, high = float(values.min()), float(values.max())
    place = np.log1p if logarithmic else float
    span = float(place(distances.max()) - place(distances.min()))
    names, last = [], -np.inf
    for x in inside:
        name = f"{x:.0f}"
        room = place(x) - last > span * (0.009 * len(name) + 0.006)
        names.append(name if room else "")
        last = place(x) if room else last
    return go.Scatter(
        x=[x for wavelength in inside for x in (wavelength + logarithmic, wavelength + logarithmic, None)],
        customdata=[x for wavelength in inside for x in (wavelength, wavelength, None)],
        y=[low, high, None] * len(inside),
        text=[text for name in names for text in ("", name, "")],
        mode="lines+text",
        textposition="top center",
        cliponaxis=False,
        line={"color": GREY, "dash": "dot", "width": 1},
        name="wavelengths",
        hovertemplate="wavelength %{customdata:.4g}",
    )


def plot_perturbation(table: pd.DataFrame, measure: str = "added_loss", *, title: str | None = None) -> go.Figure:
    """Plot the effect of a perturbation against the fraction moved, with bands of one standard error over draws.

    Of two draws, which make no interval, both are drawn as points.

    Args:
        table: table of ``perturbation_curve``.
        measure: ``"added_loss"``, ``"kl"``, ``"perplexity"``, ``"accuracy"`` or ``"downstream"``.
        title: title of the figure; default names the measure.

    Raises:
        ValueError: a table without ``kind``, ``fraction`` and the measure, or without rows.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model, perturbation_curve
        >>> from tl_posdisent.viz import plot_perturbation
        >>> model, tokens = load_demo_model(), demo_tokens(length=96)
        >>> table = perturbation_curve(model, tokens, ["index"], [0, 0.5], seeds=3, progress=False)
        >>> band, line = plot_perturbation(table).data
        >>> line.name, list(line.y) == table["added_loss"].tolist()
        ('index', True)
    """
    table = check_table(table, ["kind"], ["fraction", measure], "perturbation_curve")
    table = table.assign(**{f"{measure}_se": table.get(f"{measure}_se", np.nan)})  # no error of a single draw
    figure, two = go.Figure(), "draws" in table and bool((table["draws"] == 2).all())
    for number, (kind, rows) in enumerate(table.groupby("kind", sort=False)):
        rows, colour = rows.dropna(subset=measure).sort_values("fraction"), HUES[number % len(HUES)]
        x, y, error = (rows[name].to_numpy(dtype=float) for name in ("fraction", measure, f"{measure}_se"))
        symbol = _SYMBOLS[number % len(_SYMBOLS)]
        if two:
            draws = np.concatenate(lower_and_higher(rows, measure))
            marker = {"symbol": f"{symbol}-open", "size": 6, "color": colour}
            spread = go.Scatter(x=np.tile(x, 2), y=draws, mode="markers", marker=marker)
            spread.update(hovertemplate="one of two draws, %{x:.0%} moved: %{y:.4g}<extra></extra>")
        else:
            known = ~np.isnan(error)
            spread = go.Scatter(
                x=np.concatenate([x[known], x[known][::-1]]),
                y=np.concatenate([(y + error)[known], (y - error)[known][::-1]]),
                fill="toself",
                fillcolor=faint(colour),
                line={"width": 0},
                mode="lines",
                hoverinfo="skip",
            )
        figure.add_trace(spread.update(showlegend=False, legendgroup=str(kind)))
        figure.add_scatter(
            x=x, y=y, name=str(kind), mode="lines+markers", line={"color": colour}, marker={"symbol": symbol, "size": 8}
        )
        figure.data[-1].update(legendgroup=str(kind), hovertemplate="%{x:.0%} moved: %{y:.4g}")
    figure.update_xaxes(title="tokens out of place (% of the text)", tickformat=".0%", rangemode="tozero")
    figure.update_yaxes(title=title_of(measure, table), rangemode="tozero")
    return add_title(figure, title, f"{without_unit(title_of(measure, table))}, by tokens out of place")


def plot_length(
    tables: pd.DataFrame | Mapping[str, pd.DataFrame],
    measures: Sequence[str] = ("loss", "largest_score", "entropy"),
    *,
    in_range: int | None = None,
    title: str | None = None,
) -> go.Figure:
    """Plot loss and attention measures by position in the text, one panel for each measure.

    Args:
        tables: a table of ``length_generalization`` with ``by="bucket"``, or several by name.
        measures: columns to draw. Each bucket is a horizontal line over its positions.
        in_range: length of the training texts, to mark by a dotted line.
        title: title of the figure; default a description.

    Raises:
        ValueError: no table or measure; a table without ``start``, ``stop`` and the measures; a table by layer or head.

    Example:
        >>> from tl_posdisent import demo_tokens, length_generalization, load_demo_model
        >>> from tl_posdisent.viz import plot_length
        >>> table = length_generalization(load_demo_model(), demo_tokens(length=256), [32, 64, 256], progress=False)
        >>> line = plot_length(table, ["loss"]).data[0]
        >>> line.x.tolist(), bool(line.y[1] == table["loss"][0])
        ([32, 64, 64, 256], True)
    """
    if isinstance(measures, str) or not measures:
        raise ArgumentError("measures", f"must be a sequence of columns, got {measures!r}")
    named = dict(tables) if isinstance(tables, Mapping) else {"": tables}
    if not named:
        raise ArgumentError("tables", "must have at least one table, got none")
    figure = go.Figure().set_subplots(rows=len(measures), shared_xaxes=True, vertical_spacing=0.06)
    for number, (name, table) in enumerate(named.items()):
        table = check_table(table, [], ["start", "stop", *measures], "length_generalization")
        if head_index(table):
            raise ArgumentError(
                "tables", 'must have one row per bucket, as from length_generalization(..., by="bucket")'
            )
        table = table.sort_values("start")
        x = table[["start", "stop"]].to_numpy().ravel()
        for row, measure in enumerate(measures, start=1):
            style: dict[str, Any] = {"legendgroup": name, "showlegend": row == 1 and len(named) > 1}
            y = table[measure].to_numpy(dtype=float).repeat(2)
            line = line_style(number) | {"simplify": False}  # simplification would tilt horizontal lines
            figure.add_scatter(x=x, y=y, name=name, line=line, mode="lines", row=row, col=1, **style)
    for row, measure in enumerate(measures, start=1):
        figure.update_yaxes(title=title_of(measure, next(iter(named.values()))), row=row, col=1)
        if in_range is not None:
            label = {"annotation_text": "in range", "annotation_position": "top left"} if row == 1 else {}
            figure.add_vline(x=in_range, line={"color": GREY, "dash": "dot"}, row=row, col=1, **label)
    figure.update_layout(height=140 + 200 * len(measures))
    figure.update_xaxes(title="position in the text (tokens)", row=len(measures), col=1)
    return add_title(figure, title, "Loss and attention by position in the text")
