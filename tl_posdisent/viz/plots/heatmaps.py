"""Heat maps: a number or a verdict per head, or a number per subspace of each head."""

from __future__ import annotations

import html
import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.experiments.residual_stream.score_sources import ScoreSources
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_choice, check_integer, head_label
from tl_posdisent.viz.palette import GREY, SEQUENTIAL, SKY, VERDICTS, diverging, faint

from .tables import (
    add_title,
    check_table,
    head_index,
    mean_over_texts,
    natural_range,
    over_heads,
    title_of,
    whole,
    widened,
    without_unit,
)

WRITTEN = 160
"""Largest number of cells in which numbers are shown."""
_MAX_TICK_LABELS = 48  # largest number of heads with a tick label each, which are 10 pixels apart
_MAX_POSITION_ROWS = 24  # largest number of heads with a row of positions each
_MAX_TITLE_LINE = 16  # largest number of characters of a line above a colour bar
_MIN_COLOUR_RANGE = 0.2  # least range of the colours of measures between 0 and 1, so that small differences look small


def plot_heads(
    table: pd.DataFrame,
    value: str,
    *,
    by: Literal["head", "layer", "position"] = "head",
    random: pd.DataFrame | None = None,
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
            highest head as a band. ``"position"`` draws heads on y and positions on x, for a table with the column
            ``position``, as from ``head_patching(..., positions=...)``: of more than 24 heads,
            those with the largest values.
        random: for ``by="layer"``: a table of random weights with the same columns, drawn beside the other.
        signed: whether to use a diverging colour scale, white at 0. Default: if a value is negative.
        limits: limits of the colour scale; default from 0, or symmetric about it; for correlations and shares, from
            the lowest 5 % of the heads to the highest, at least 0.2 apart. An end that stands for values beyond it,
            too, is marked ≤ or ≥ in the colour bar.
        title: title of the figure; default names the measure.

    Raises:
        ValueError: a table without these columns or rows; several rows for a head; limits that are not ascending;
            ``random`` for another ``by``.

    Example:
        >>> from tl_posdisent import additivity, demo_tokens, load_demo_model, plot_heads
        >>> table = additivity(load_demo_model(), demo_tokens(length=64), progress=False)
        >>> figure = plot_heads(table, "r")
        >>> r = table.query("layer == 4 and head == 2")["r"].item()
        >>> float(figure.data[0].z[4][2]) == r > 0.8
        True
    """
    check_choice("by", by, ("head", "layer", "position"))
    if random is not None and by != "layer":
        raise ArgumentError("random", f'must be None unless by="layer", got a table with by={by!r}')
    index, makers = ["layer", "head"], "additivity, controlled_distance or head_ablation"
    if by == "position":
        table = check_table(table, [*index, by], [value], "head_patching(..., positions=...)")
        return _positions(
            mean_over_texts(table, [*index, by], [value]), value, signed, limits, title_of(value, table), title
        )
    table = check_table(table, index, [value], makers)
    means = mean_over_texts(table, index, [value])
    if by == "layer":
        both = [over_heads(means, by, [], [value])]
        if random is not None:
            both.append(
                over_heads(
                    mean_over_texts(check_table(random, index, [value], makers), index, [value]), by, [], [value]
                )
            )
        return _layers(both, value, limits, title_of(value, table), title)
    grid = means.pivot(index="layer", columns="head", values=value)
    heat = _heat_map(grid, title_of(value, table), signed, limits, value)
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


def _layers(both: Sequence[pd.DataFrame], value: str, limits: Any, axis: str, title: str | None) -> go.Figure:
    """Draw a line through the means of the layers, and a band from the lowest to the highest head.

    ``both`` are the tables of a model and, if given, of random weights, which are drawn in grey below it.
    """
    figure = go.Figure()
    styles = [(SKY, "solid", ""), (GREY, "dot", "random weights, ")]
    for means, (colour, dash, of) in reversed(list(zip(both, styles, strict=False))):
        x, low, high = (means[name].to_numpy() for name in ("layer", "low", "high"))
        edge: dict[str, Any] = {"line": {"width": 0}, "mode": "lines", "hoverinfo": "skip"}
        figure.add_scatter(x=x, y=low, name=f"{of}lowest", showlegend=False, **edge)
        band = {"fill": "tonexty", "fillcolor": faint(colour), **edge}
        figure.add_scatter(x=x, y=high, name=f"{of}lowest to highest head", **band)
        hover = f"{of}layer %{{x}}: %{{y:.4g}}, heads from %{{customdata[0]:.4g}} to %{{customdata[1]:.4g}}"
        line = {"line": {"color": colour, "dash": dash}, "mode": "lines+markers", "hovertemplate": hover}
        mean = {"name": f"{of}mean over heads", "customdata": np.stack([low, high], 1)}
        figure.add_scatter(x=x, y=means[value].to_numpy(), **mean, **line)
    least = float(np.nanmin(np.concatenate([means["low"] for means in both])))
    most = float(np.nanmax(np.concatenate([means["high"] for means in both])))
    bounds = natural_range(value, least, most)
    ends = _limits(limits) if limits is not None else None
    if ends is None and bounds:
        ends = widened(least, most, _MIN_COLOUR_RANGE, bounds)
    figure.update_yaxes(title=axis.replace(" (", "<br>("), range=ends, rangemode=None if ends else "tozero")
    return add_title(figure.update_xaxes(title="layer"), title, f"{without_unit(axis)}, by layer")


def _positions(
    means: pd.DataFrame, value: str, signed: bool | None, limits: Any, axis: str, title: str | None
) -> go.Figure:
    """Draw a row for each head, or for those with the largest values, and a column for each position."""
    grid = means.pivot(index=["layer", "head"], columns="position", values=value)
    sizes, n = grid.abs().max(axis=1), len(grid)
    grid = grid[sizes.rank(ascending=False, method="first") <= _MAX_POSITION_ROWS]
    heat = _heat_map(grid, axis, signed, limits, value)
    names = [head_label(layer, head) for layer, head in grid.index]
    heat.update(x=whole(grid.columns), y=names, hovertemplate="%{y}, position %{x}: %{z:.4g}")
    note = f"the {_MAX_POSITION_ROWS} of {n} heads with the largest values" if n > _MAX_POSITION_ROWS else ""
    figure = add_title(go.Figure(heat), title, f"{without_unit(axis)}, by head and position", note)
    return _as_map(figure, "position", "head")


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
            from ``subspace_patterns`` or ``positional_symbolic(..., by_subspace=True)`` (averaged over texts).
            Subspaces are named by their wavelength in positions, or by number if layers differ in frequencies.
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
    heat = _heat_map(grid, title_of(value, table), signed, limits, value, room=0)
    names, heads = wavelengths(means), grid.columns.to_frame(index=False)
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


def plot_score_sources(
    found: ScoreSources,
    by: Literal["key", "query", "source"] = "key",
    *,
    piece: str | None = None,
    top: int = 12,
    limits: tuple[float | int, float | int] | None = None,
    title: str | None = None,
) -> go.Figure:
    """Plot the terms of a query's scores: sources on y, keys on x.

    Args:
        found: the result of ``score_sources``.
        by: side of the sources, as in ``ScoreSources.terms``. The columns of ``"key"`` and ``"query"`` add up to the
            scores over all sources.
        piece: one of ``found.pieces``, such as ``"content"``; default their sum.
        top: number of sources to show, those with the largest absolute term of a key.
        limits, title: as in ``plot_heads``.

    Raises:
        ValueError: invalid arguments.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model, score_sources
        >>> from tl_posdisent.viz import plot_score_sources
        >>> found = score_sources(load_demo_model(), demo_tokens(length=64), 3, 1, query=40, keys=[39, 38])
        >>> plot_score_sources(found, top=4).data[0].z.shape
        (4, 2)
    """
    terms, largest = score_terms(found, by, piece, top)
    order = sorted(largest, key=lambda n: _place_in_stream(found.sources[n]))
    names = [found.sources[n] for n in order]
    keys = [html.escape(f"{key} {found.words[key]!r}") for key in found.keys]
    grid = pd.DataFrame(terms[:, order].T.cpu().numpy(), index=names, columns=keys)
    what = "score" if piece is None else piece.replace("_", " ")
    heat = _heat_map(grid, what if found.against is None else f"{what}, difference", True, limits, "term")
    heat.update(x=keys, y=names, hovertemplate=f"{SIDES[by]} %{{y}}, key %{{x}}: %{{z:.4g}}")
    name = f"Sources of the scores of {head_label(found.layer, found.head)}"
    minus = "" if found.against is None else f", minus the scores of key {found.against}"
    figure = add_title(go.Figure(heat), title, f"{name} at query {found.query}{minus}")
    return _as_map(figure, "key", SIDES[by])


SIDES = {"key": "source of the key", "query": "source of the query", "source": "source on either side"}


def score_terms(found: Any, by: Any, piece: Any, top: Any) -> tuple[Float64[Tensor, "key source"], list[int]]:
    """Return the terms to draw of a result of ``score_sources`` (one piece of them, or their sum), and the sources with
    the largest."""
    if not isinstance(found, ScoreSources):
        raise ArgumentError("found", f"must be the result of score_sources, got {type(found).__name__}")
    check_choice("by", by, SIDES)
    check_choice("piece", piece, (None, *found.pieces))
    check_integer("top", top, 1)
    terms = found.terms(by)
    terms = terms.sum(1) if piece is None else terms[:, found.pieces.index(piece)]
    return terms, terms.abs().amax(0).argsort(descending=True, stable=True)[:top].tolist()


def _place_in_stream(source: str) -> list[float]:
    """Return the place of a source: embeddings, then by layer heads, bias and MLP, then the layer's own bias."""
    first = {"embedding": "-2", "positional embedding": "-1"}.get(source, "inf")
    return [*map(float, re.findall(r"\d+", source) or [first]), math.inf, source.endswith("MLP")]


_LETTERS = {"not used": "·", "no effect": "–", "undecided": "?"}


def plot_verdicts(table: pd.DataFrame, *, rungs: pd.DataFrame | None = None, title: str | None = None) -> go.Figure:
    """Plot the verdict of each head: layers on y, the first at the top, heads on x.

    Below the letter of a verdict is the share that the rung of that name recovers, of the divergence of predictions or
    of the loss, whichever decided the verdicts. Hovering shows the gap.

    Args:
        table: table of ``head_verdicts``.
        rungs: table of ``attention_ladder``, to show the share that each rung recovers on hovering: of the measure in
            ``table.attrs``, or of the default of ``head_verdicts``.
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
        hover=verdict_texts(table, rungs),
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
        texttemplate="%{text}" if codes.size <= WRITTEN else None,
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


def verdict_texts(table: pd.DataFrame, rungs: pd.DataFrame | None) -> list[str]:
    """Describe each head of ``head_verdicts``: verdict, gap, and the share that each rung recovers."""
    missing = [float("nan")] * len(table)
    between = table.get("between", pd.Series("", table.index)).fillna("")  # empty cells of a CSV file are read as NaN
    verdicts = table["verdict"].where(between == "", table["verdict"] + " between " + between)
    columns = (table["layer"], table["head"], verdicts, table["gap"], table.get("error", missing))
    texts = [
        f"{verdict}<br>gap {gap:.3g}{'' if pd.isna(se) else f' ± {se:.2g} (standard error)'} nats per token"
        for *_, verdict, gap, se in zip(*columns, strict=True)
    ]
    if rungs is None:
        return texts
    of_kl = table.attrs.get("measure", "kl" if "recovered_kl" in rungs else "loss") == "kl"
    column = "recovered_kl" if of_kl else "recovered"
    rungs = check_table(rungs, ["layer", "head", "rung"], [column], "attention_ladder")
    tried = rungs[~rungs["rung"].isin(["mean_output", "uniform", "untouched"])].dropna(subset=column)
    listed: dict[tuple[int, int], list[str]] = {}
    for layer, head, rung, share in tried[["layer", "head", "rung", column]].itertuples(index=False):
        listed.setdefault((layer, head), []).append(f"{rung} {share:.0%}")
    shares = [", ".join(listed.get(place, ())) for place in zip(*columns[:2], strict=True)]
    return [text + (f"<br>recovered: {share}" if share else "") for text, share in zip(texts, shares, strict=True)]


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


def _heat_map(
    grid: pd.DataFrame, title: str, signed: bool | None, limits: Any, value: str, room: int = WRITTEN
) -> go.Heatmap:
    z = grid.to_numpy(dtype=float, na_value=np.nan)
    low, high = float(np.nanmin(z, initial=0)), float(np.nanmax(z, initial=0))
    signed = low < 0 if signed is None else signed
    if limits is not None:
        low, high = _limits(limits)
    elif signed:
        high = max(-low, high) or 1.0
        low = -high
    else:
        high = high if high > low else low + 1.0
        low, high = bounded_limits(value, z) or (low, high)
    return go.Heatmap(
        z=z,
        zmin=low,
        zmax=high,
        colorscale=diverging(low, high) if signed else SEQUENTIAL,
        colorbar={"title": {"text": bar_title(title), "side": "top"}, **_ticks_of_clipped(z, low, high)},
        texttemplate=f"%{{z:.{max(2, 1 - math.floor(math.log10(high)))}f}}" if z.size <= room and high > 0 else None,
        name="",
    )


def bar_title(title: str) -> str:
    """Break the title of a colour bar into short lines. It stands above the bar: beside it, it would cover the ticks.

    >>> bar_title("what − where over random (share of variance)")
    'what − where<br>over random<br>(share of<br>variance)'
    """
    lines = (
        textwrap.wrap(part, _MAX_TITLE_LINE, break_long_words=False) for part in title.replace(" (", "\n(").split("\n")
    )
    return "<br>".join(line for part in lines for line in part)


def _ticks_of_clipped(z: Any, low: float, high: float) -> dict[str, Any]:
    """Make ticks of a colour bar that say where its end stands for values beyond it; none if there are no such."""
    below, above = bool(np.nanmin(z, initial=low) < low), bool(np.nanmax(z, initial=high) > high)
    if not (below or above):
        return {}
    size = 10.0 ** math.floor(math.log10((high - low) / 3))
    step = next(size * x for x in (5, 2, 1) if size * x <= (high - low) / 3)
    inner = step * np.arange(math.ceil(low / step), math.floor(high / step) + 1)
    inner = inner[(inner > low + step * below / 2) & (inner < high - step * above / 2)]
    digits = max(0, 1 - math.floor(math.log10(step)))  # one more than the step's, for the ends
    ends = {low: "≤ "} if below else {}
    ends |= {high: "≥ "} if above else {}
    ticks = {float(x): f"{x:.{max(0, digits - 1)}f}" for x in inner} | {
        x: f"{s}{x:.{digits}f}" for x, s in ends.items()
    }
    return {"tickvals": list(ticks), "ticktext": list(ticks.values())}


def bounded_limits(value: str, values: Any) -> tuple[float, float] | None:
    """Return colour limits of a measure between 0 and 1, without its lowest 5 %, ``_MIN_COLOUR_RANGE`` or more."""
    known = np.asarray(values, dtype=float)
    known = known[np.isfinite(known)]
    bounds = natural_range(value, float(known.min()), float(known.max())) if known.size else None
    return widened(float(np.quantile(known, 0.05)), float(known.max()), _MIN_COLOUR_RANGE, bounds) if bounds else None


def _limits(limits: Any) -> tuple[float, float]:
    try:
        low, high = (float(x) for x in (() if isinstance(limits, (str, bytes)) else limits))
    except (TypeError, ValueError):
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ArgumentError("limits", f"must be two ascending numbers, got {limits!r}")
    return low, high


def wavelengths(subspaces: pd.DataFrame) -> list[str]:
    """Name the subspaces, in ascending order, by their wavelengths if these are the same in all layers."""
    frequencies = subspaces.groupby("subspace")["frequency"].agg(["min", "max"])
    if not np.allclose(frequencies["min"], frequencies["max"], rtol=1e-6, atol=0):
        return whole(frequencies.index)
    return ["∞" if theta == 0 else f"{2 * math.pi / abs(theta):.0f}" for theta in frequencies["min"]]
