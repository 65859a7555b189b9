"""Bar charts of variance shares."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from tl_posdisent.rope.factorial_variance_decomposition import COMPONENTS
from tl_posdisent.viz.palette import component_colour

from .heatmaps import head_axis, head_names, head_ticks
from .tables import add_title, check_table, head_index, mean_over_texts


def plot_shares(table: pd.DataFrame, *, title: str | None = None) -> go.Figure:
    """Plot the variance decomposition of each head's scores: seven stacked shares that add up to 1.

    From below: ``distance``, ``query`` and ``key``, which make the three-axis sum; ``query:key`` and
    ``distance:query``, which the two-axis sum has as well; and ``distance:key`` and ``distance:query:key``, which are
    in neither.

    Args:
        table: table of ``controlled_distance``, or of ``to_frame`` of ``VarianceShares``: one row per head or layer,
            with a column for each of ``COMPONENTS``.
        title: title of the figure; default a description.

    Raises:
        ValueError: a table without these columns or without rows; several rows for a head.

    Example:
        >>> from tl_posdisent import controlled_distance, demo_tokens, load_demo_model, plot_shares
        >>> table = controlled_distance(load_demo_model(), demo_tokens(length=64), progress=False)
        >>> figure = plot_shares(table)
        >>> round(float(sum(bar.y[9] for bar in figure.data)), 9)  # layer 1, head 1
        1.0
    """
    index = head_index(table) or ["head"]
    means = mean_over_texts(check_table(table, index, COMPONENTS, "controlled_distance"), index, COMPONENTS)
    bars = [
        go.Bar(
            x=head_axis(means),
            y=means[component].to_numpy(),
            name=component.replace(":", " × "),
            marker={"color": component_colour(component), "line": {"width": 0}},
            customdata=head_names(means),
            hovertemplate="%{customdata}: %{y:.3f}",
        )
        for component in sorted(COMPONENTS, key=lambda effect: "distance:" in effect)
    ]
    figure = go.Figure(bars).update_layout(barmode="relative", bargap=0.1, legend={"traceorder": "reversed"})
    figure.update_xaxes(**head_ticks(means))
    figure.update_yaxes(title="share of the variance", range=[0, 1.0001])  # shares add up to 1
    return add_title(figure, title, "Variance decomposition of the scores of each head")
