"""Line charts over distances, perturbed fractions, positions of a text, and training steps."""

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
from tl_posdisent.utils.validation import check_flag, check_integer, head_label
from tl_posdisent.utils.words import plural
from tl_posdisent.viz.palette import GREY, HUES, SEQUENTIAL, faint, line_style, on_scale

from .tables import (
    HeadOrLayer,
    add_title,
    check_table,
    head_index,
    mean_over_texts,
    natural_range,
    over_heads,
    title_of,
    widened,
    without_unit,
)

_MAX_EXACT_DISTANCE = 32  # largest distance that is drawn without averaging
_MIN_AXIS_RANGE = 0.2  # least height of an axis of plot_length, relative to the largest number
_PANELS_PER_ROW = 6  # panels of layers per row
_SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x")


def plot_distance(
    profiles: AdditiveFit | AttentionFit | pd.DataFrame,
    *,
    wavelengths: Sequence[float] | None = None,
    value: str = "value",
    top: int = 8,
    by: HeadOrLayer = "head",
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
        by: ``"layer"`` for the mean over the heads of each layer.
        log: whether the axis is logarithmic, in 1 + distance; default True if no distance is negative.
        title: title of the figure; default a description.

    Raises:
        ValueError: invalid arguments; several rows for a distance of a head; ``log`` with negative distances.

    Example:
        >>> from tl_posdisent import demo_tokens, fit_additive, load_demo_model, plot_distance, read_attention
        >>> model = load_demo_model()
        >>> _, cache = model.run_with_cache(demo_tokens(length=128))
        >>> fit = fit_additive(cache["attn_scores", 3])
        >>> figure = plot_distance(fit, wavelengths=read_attention(model, 3).rotary.wavelengths.tolist(), log=False)
        >>> figure.data[5].name, figure.data[8].name, bool(figure.data[5].y[20] == fit.distance[0, 5, 20])
        ('head 5', 'wavelengths', True)
    """
    check_integer("top", top, 1)
    table = profiles.to_frame("distance") if isinstance(profiles, (AdditiveFit, AttentionFit)) else profiles
    table = check_table(table, [], ["distance", value], 'AdditiveFit.to_frame("distance")')
    heads = head_index(table)
    columns = [value, *(["cells"] if "cells" in table else [])]
    means = over_heads(mean_over_texts(table, [*heads, "distance"], columns), by, ["distance"], columns)
    heads, distances = ["layer"] if by == "layer" else heads, means["distance"]
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
    note = f"In colour: the {top} of {len(lines)} {by}s whose profile varies most" if others else ""
    if sum(map(len, lines.values())) < n_values:
        note += f"{'<br>' if note else ''}Beyond distance {_MAX_EXACT_DISTANCE}: means over neighbouring distances"
    default = "Distance component of the scores" if value == "value" else f"{without_unit(named)}, by distance"
    return add_title(figure, title, default, note).update_layout(margin_t=100 if "<br>" in note else 80)


def plot_attention_by_distance(table: pd.DataFrame, *, title: str | None = None) -> go.Figure:
    """Plot the mean attention by distance, a line per intervention; several heads are averaged.

    Beyond distance 32 the lines are means over an eighth of an octave, as in ``plot_distance``.

    Args:
        table: table of ``attention_by_distance``, or some rows of it, such as those of one head.
        title: title of the figure; default names the heads.

    Raises:
        ValueError: a table without ``intervention``, ``layer``, ``head``, ``distance``, ``attention`` and ``cells``, or
            with several rows for a distance of a head.

    Example:
        >>> from tl_posdisent import demo_tokens, dummy_distance, load_demo_model
        >>> from tl_posdisent.experiments import attention_by_distance
        >>> from tl_posdisent.viz import plot_attention_by_distance
        >>> model = load_demo_model()
        >>> five = {"every distance 5": dummy_distance(model, 5)}
        >>> table = attention_by_distance(model, demo_tokens(length=64), five, layers=[3], progress=False)
        >>> figure = plot_attention_by_distance(table.query("head == 4"))
        >>> [line.name for line in figure.data], figure.layout.title.text.partition("<br>")[0]
        (['unmodified', 'every distance 5'], 'Mean attention of L3H4, by distance')
    """
    numbers = ["layer", "head", "distance", "attention", "cells"]
    table = check_table(table, ["intervention"], numbers, "attention_by_distance")
    mean_over_texts(table, ["intervention", *numbers[:3]], ["attention"])  # raises for several rows
    heads = table[["layer", "head"]].drop_duplicates()
    of = head_label(*heads.iloc[0].astype(int)) if len(heads) == 1 else f"{len(heads)} heads"
    means = table.groupby(["intervention", "distance"], sort=False)[["attention", "cells"]].mean().reset_index()
    logarithmic = bool(means["distance"].min() >= 0)
    figure = go.Figure()
    for number, (name, rows) in enumerate(means.groupby("intervention", sort=False)):
        line = _profile(_neighbours_averaged(rows, "attention"), "attention", logarithmic)
        figure.add_trace(line.update(line=line_style(number), name=str(name)))
    _distance_axis(figure, means["distance"], logarithmic).update_yaxes(title="mean attention", rangemode="tozero")
    return add_title(figure, title, f"Mean attention of {of}, by distance")


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
        measures: columns to draw. Each bucket is a horizontal line over its positions. The range of a panel is at
            least a fifth of its largest number, so that small changes look small.
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
        y = np.concatenate([table[measure].to_numpy(dtype=float) for table in named.values()])
        y = y[np.isfinite(y)] if np.isfinite(y).any() else np.zeros(1)
        margin = 0.05 * (y.max() - y.min())
        ends = widened(float(y.min() - margin), float(y.max() + margin), _MIN_AXIS_RANGE * float(abs(y).max()) or 1.0)
        figure.update_yaxes(title=title_of(measure, next(iter(named.values()))), range=ends, row=row, col=1)
        if in_range is not None:
            label = {"annotation_text": "in range", "annotation_position": "top left"} if row == 1 else {}
            figure.add_vline(x=in_range, line={"color": GREY, "dash": "dot"}, row=row, col=1, **label)
    figure.update_layout(height=140 + 200 * len(measures))
    figure.update_xaxes(title="position in the text (tokens)", row=len(measures), col=1)
    return add_title(figure, title, "Loss and attention by position in the text")


def plot_dynamics(table: pd.DataFrame, value: str = "r_two_axis", *, title: str | None = None) -> go.Figure:
    """Plot a measure of every head, or of every layer, over training steps.

    Args:
        table: table of ``dynamics`` or ``gradient_margins``, or any other table by head with a column ``step``.
        value: the column to draw.
        title: title of the figure; default names the measure.

    Returns:
        A figure with a panel for each layer and a line for each of its heads; for a table with one row per step and
        layer, one panel with a line for each layer.

    Raises:
        ValueError: a table without these columns or rows; several rows for a step of one head.

    Example:
        >>> import pandas as pd
        >>> from tl_posdisent.viz import plot_dynamics
        >>> rows = [(step, 0, head, head + step / 100) for step in (0, 10) for head in (0, 1)]
        >>> figure = plot_dynamics(pd.DataFrame(rows, columns=["step", "layer", "head", "r_two_axis"]))
        >>> [(line.name, line.x.tolist(), line.y.tolist()) for line in figure.data]
        [('head 0', [0, 10], [0.0, 0.1]), ('head 1', [0, 10], [1.0, 1.1])]
    """
    makers = "dynamics or gradient_margins"
    table = check_table(table, [], ["step", "layer", value], makers)
    by_head = "head" in table.columns and bool(table.duplicated(["step", "layer"]).any())
    key = ["step", "layer", *(["head"] if by_head else [])]
    if bool(table.duplicated(key).any()):
        raise ArgumentError("table", f"must have one row for each {', '.join(key)}, got several: select rows first")
    table = table.sort_values(key)
    layers = sorted(table["layer"].unique())
    titles = [f"layer {int(layer)}" for layer in layers] if by_head else None
    panels = len(layers) if by_head else 1
    columns, panel_rows = min(panels, _PANELS_PER_ROW), -(-panels // _PANELS_PER_ROW)
    spacing = {"horizontal_spacing": 0.1 / columns, "vertical_spacing": 0.25 / panel_rows}
    figure = go.Figure().set_subplots(
        rows=panel_rows, cols=columns, shared_xaxes="all", shared_yaxes="all", subplot_titles=titles, **spacing
    )
    line_of, lines = ("head", ["layer", "head"]) if by_head else ("layer", ["layer"])
    named = {number: n for n, number in enumerate(sorted(table[line_of].unique()))}
    for _, rows in table.groupby(lines):
        number = rows[line_of].iloc[0]
        style = line_style(named[number])
        if line_of == "layer" and len(named) > len(HUES):  # from light to dark with depth
            style = {"color": on_scale(SEQUENTIAL, 0.25 + 0.75 * named[number] / len(named))}
        row, column = divmod(layers.index(rows["layer"].iloc[0]) if by_head else 0, columns)
        x, y = rows["step"].to_numpy(), rows[value].to_numpy()
        first = not any(trace.legendgroup == str(number) for trace in figure.data)
        figure.add_scatter(
            x=x, y=y, name=f"{line_of} {int(number)}", mode="lines", line=style, row=row + 1, col=column + 1
        )
        figure.data[-1].update(legendgroup=str(number), showlegend=first)
    low, high = float(table[value].min()), float(table[value].max())
    natural = natural_range(value, low, high)
    figure.update_yaxes(range=natural) if natural else figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title=title_of(value, table), row=(panel_rows + 1) // 2, col=1)
    figure.update_xaxes(title="training step", row=panel_rows, col=(columns + 1) // 2)
    figure.update_xaxes(ticklabeloverflow="hide past domain" if panels > 1 else None)
    figure.update_layout(height=150 + 150 * panel_rows if panel_rows > 1 else None)
    return add_title(figure, title, f"{without_unit(title_of(value, table))}, during training")
