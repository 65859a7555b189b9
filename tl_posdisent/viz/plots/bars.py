"""Bar charts: variance shares, additive substitution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pandas as pd
import plotly.graph_objects as go

from tl_posdisent.rope.factorial_variance_decomposition import COMPONENTS
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_choice
from tl_posdisent.viz.palette import BLUE, GREY, ORANGE, component_colour

from .heatmaps import head_axis, head_names, head_ticks
from .tables import add_title, check_table, head_index, mean_over_texts, title_of


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
    order = sorted(COMPONENTS, key=lambda effect: "distance:" in effect)
    figure = stacked_shares(head_axis(means), means, order, names=head_names(means))
    figure.update_xaxes(**head_ticks(means))
    figure.update_yaxes(range=[0, 1.0001])  # shares add up to 1
    return add_title(figure, title, "Variance decomposition of the scores of each head")


def stacked_shares(
    x: Sequence[Any], table: pd.DataFrame, components: Sequence[str], *, names: Sequence[str] | None = None
) -> go.Figure:
    """Draw stacked shares of components, one bar per row of a table; ``names`` of the bars appear on hovering."""
    bars = [
        go.Bar(
            x=x,
            y=table[component].to_numpy(),
            name=component.replace(":", " × "),
            marker={"color": component_colour(component), "line": {"width": 0}},
            customdata=x if names is None else names,
            hovertemplate="%{customdata}: %{y:.3f}",
        )
        for component in components
    ]
    figure = go.Figure(bars).update_layout(barmode="relative", bargap=0.1, legend={"traceorder": "reversed"})
    return figure.update_yaxes(title="share of the variance")


def plot_substitution(
    table: pd.DataFrame, measure: Literal["change", "kl", "loss"] = "change", *, title: str | None = None
) -> go.Figure:
    """Plot the added loss if all scores are replaced by some of their components.

    Args:
        table: table of ``additive_substitution``.
        measure: the column to draw: ``"change"`` (of the loss), ``"kl"`` or ``"loss"``, all in nats per token.
        title: title of the figure; default a description.

    Raises:
        ValueError: a table without these columns, or without rows of scope ``"all"``; an unknown measure.

    Example:
        >>> from tl_posdisent import additive_substitution, demo_tokens, load_demo_model
        >>> from tl_posdisent.viz import plot_substitution
        >>> table = additive_substitution(load_demo_model(), demo_tokens(length=48), layers=[4], progress=False)
        >>> bars = {bar.name: dict(zip(bar.y, bar.x)) for bar in plot_substitution(table).data}
        >>> row = table[(table["scope"] == "all") & (table["keep"] == "distance+key")]
        >>> float(bars["fit"]["distance + key"]) == row["change"].item() > 0
        True
    """
    check_choice("measure", measure, ("change", "kl", "loss"))
    table = check_table(table, ["scope", "put_in", "keep"], [measure], "additive_substitution")
    ranked = table[table["scope"] == "all"].sort_values(measure, kind="stable")
    if ranked.empty:
        raise ArgumentError("table", 'must have rows of scope "all", as a table of additive_substitution, got none')
    names = ranked["keep"].str.replace("+", " + ", regex=False)
    names = names.mask(names == "mean", "uniform attention").mask(ranked["put_in"] == "zero", "no attention output")
    ranked["name"] = names.mask(ranked["put_in"] == "shuffled fit", names + ", shuffled text")
    figure = go.Figure()
    for put_in, colour in {"fit": BLUE, "shuffled fit": ORANGE, "zero": GREY}.items():
        chosen = ranked[ranked["put_in"] == put_in]
        x, y, errors = chosen[measure].to_numpy(), chosen["name"].to_numpy(), _errors(chosen, measure)
        figure.add_bar(x=x, y=y, error_x=errors, name=put_in, marker={"color": colour}, orientation="h")
    figure.update_traces(texttemplate="%{x:.2f}", textposition="outside", cliponaxis=False)
    figure.update_layout(height=140 + 22 * len(ranked), barmode="overlay", legend={"title": "scores replaced by"})
    low, high = min(ranked[measure].min(), 0) * 1.15, max(ranked[measure].max(), 0) * 1.15 or 1  # room for numbers
    figure.update_xaxes(title=title_of(measure, table), range=[low, high])
    order = {"categoryorder": "array", "categoryarray": ranked["name"].to_numpy()}
    figure.update_yaxes(title="components that are kept", automargin=True, showgrid=False, **order)
    return add_title(figure, title, "Scores replaced by components of their additive fit, everywhere")


def _errors(table: pd.DataFrame, measure: str) -> dict[str, Any] | None:
    """Return error bars from a column such as ``effect_se``, if the table has one."""
    if f"{measure}_se" not in table:
        return None
    return {"type": "data", "array": table[f"{measure}_se"].to_numpy(dtype=float), "thickness": 1, "width": 2}
