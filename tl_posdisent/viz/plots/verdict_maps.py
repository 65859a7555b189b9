"""Heat maps of categories: a verdict for each head."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from tl_posdisent.viz.palette import VERDICTS, verdict_colour

from .axis_titles import add_title, whole
from .table_checks import check_table, mean_over_texts

_WRITTEN = 160  # cells that have room for a letter


def plot_verdicts(table: pd.DataFrame, *, title: str | None = None) -> go.Figure:
    """Plot the verdict of each head: layers on y, the first at the top, heads on x.

    For the share of the loss that one rung recovers: ``plot_heads(table[table["rung"] == "static"], "recovered")``
    with rows of ``attention_ladder`` without a control.

    Args:
        table: of ``head_verdicts``: ``layer``, ``head``, ``verdict`` and ``gap``, one row for each head.
        title: of the figure; default counts the heads of each verdict.

    Returns:
        A figure. The colour bar names the verdicts; small maps have their first letters written in, and all show the
        rung and the gap in nats per token where the mouse is.

    Raises:
        ValueError: a table without these columns or without rows; rows of layers or of the whole model; several for a
            head.

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
    mean_over_texts(table, index, ["gap"])  # refuses what has no head, or several rows for one
    named = table.assign(verdict=table["verdict"].astype(str))
    found = set(named["verdict"])
    names = [name for name in VERDICTS if name in found] + sorted(found - set(VERDICTS))
    named["letter"] = ["–" if name == "no effect" else name[0].upper() for name in named["verdict"]]
    named["number"] = named["verdict"].map(names.index)
    error = named["error"] if "error" in named else float("nan")
    rung = named["rung"].astype(str) if "rung" in named else named["verdict"]
    named = named.assign(error=error, rung=rung)
    grids = {name: named.pivot(index="layer", columns="head", values=name) for name in _SHOWN}
    codes, n = grids["number"], len(names)
    steps = [(k / n, verdict_colour(name)) for k, name in enumerate(names)]
    heat = go.Heatmap(
        x=whole(codes.columns),
        y=whole(codes.index),
        z=codes.to_numpy(dtype=float, na_value=float("nan")),
        zmin=-0.5,
        zmax=n - 0.5,
        colorscale=[(at + part / n, colour) for at, colour in steps for part in (0, 1)],
        colorbar={"title": "verdict", "tickvals": list(range(n)), "ticktext": names},
        text=grids["letter"].fillna("").to_numpy(),
        texttemplate="%{text}" if codes.size <= _WRITTEN else None,
        customdata=[
            [
                None if pd.isna(verdict) else f"{verdict} ({rung})<br>gap {gap:.3g} ± {error:.2g} nats per token"
                for verdict, rung, gap, error in zip(*row, strict=True)
            ]
            for row in zip(*(grids[x].to_numpy() for x in ("verdict", "rung", "gap", "error")), strict=True)
        ],
        hovertemplate="layer %{y}, head %{x}: %{customdata}",
        name="",
    )
    counts = named["verdict"].value_counts()
    said = ", ".join(f"{counts[name]} {name}" for name in names)
    figure = add_title(go.Figure(heat), title, "What the predictions need of each head's attention", said)
    figure.update_xaxes(title="head", type="category", showgrid=False)
    return figure.update_yaxes(title="layer", type="category", autorange="reversed", showgrid=False)


_SHOWN = ("number", "letter", "verdict", "rung", "gap", "error")
