"""Heat maps of categories: a verdict for each head."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from tl_posdisent.viz.palette import GREY, VERDICTS

from .axis_titles import add_title, whole
from .heatmaps import WRITTEN, as_map
from .table_checks import check_table, mean_over_texts


def plot_verdicts(table: pd.DataFrame, *, title: str | None = None) -> go.Figure:
    """Plot the verdict of each head: layers on y, the first at the top, heads on x.

    Hovering shows the rung and the gap in nats per token.

    Args:
        table: of ``head_verdicts``: ``layer``, ``head``, ``verdict`` and ``gap``, one row for each head.
        title: of the figure; default counts the heads of each verdict.

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
    verdicts = table["verdict"].astype(str)
    names = [name for name in VERDICTS if name in set(verdicts)] + sorted(set(verdicts) - set(VERDICTS))
    rungs, errors = table.get("rung", verdicts), table.get("error", [float("nan")] * len(table))
    cells = table[["layer", "head"]].assign(
        number=verdicts.map(names.index),
        letter=["–" if name == "no effect" else name[0].upper() for name in verdicts],
        hover=[
            f"{verdict} ({rung})<br>gap {gap:.3g} ± {error:.2g} nats per token"
            for verdict, rung, gap, error in zip(verdicts, rungs, table["gap"], errors, strict=True)
        ],
    )
    grids = cells.pivot(index="layer", columns="head")
    codes, n = grids["number"], len(names)
    steps = [(k / n, VERDICTS.get(name, GREY)) for k, name in enumerate(names)]
    heat = go.Heatmap(
        x=whole(codes.columns),
        y=whole(codes.index),
        z=codes.to_numpy(dtype=float, na_value=float("nan")),
        zmin=-0.5,
        zmax=n - 0.5,
        colorscale=[(at + part / n, colour) for at, colour in steps for part in (0, 1)],
        colorbar={"title": "verdict", "tickvals": list(range(n)), "ticktext": names},
        text=grids["letter"].fillna("").to_numpy(),
        texttemplate="%{text}" if codes.size <= WRITTEN else None,
        customdata=grids["hover"].fillna("").to_numpy(),
        hovertemplate="layer %{y}, head %{x}: %{customdata}",
        name="",
    )
    counted = ", ".join(f"{(verdicts == name).sum()} {name}" for name in names)
    figure = add_title(go.Figure(heat), title, "What the predictions need of each head's attention", counted)
    return as_map(figure, "head", "layer")
