"""Bar charts: variance shares, head ablation, additive substitution."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import pandas as pd
import plotly.graph_objects as go

from tl_posdisent.rope.variance_decomposition import COMPONENTS
from tl_posdisent.synthetic.analysis.sufficiency import SufficientHeads
from tl_posdisent.utils.validation import check_choice
from tl_posdisent.viz.palette import BLUE, GREY, ORANGE, RUST, component_colour

from .axis_titles import add_title, title_of, whole
from .heatmaps import head_axis, head_names, head_ticks
from .table_checks import check_table, head_index, mean_over_texts

_PUT_IN_COLOURS = {"fit": BLUE, "shuffled fit": ORANGE, "zero": GREY}


def plot_shares(table: pd.DataFrame, *, title: str | None = None) -> go.Figure:
    """Plot the variance decomposition of each head's scores: seven stacked shares that add up to 1.

    Args:
        table: of ``controlled_distance``, or ``to_frame`` of ``VarianceShares``: one row per head, or per layer, with
            a column for each of ``COMPONENTS``.
        title: of the figure; default says what it shows.

    Returns:
        A figure with a bar for each head, or layer. Interactions of the distance, which break additivity, are on top.

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
    figure.update_yaxes(range=[0, 1.0001])  # they add up to 1
    return add_title(figure, title, "Variance decomposition of the scores of each head")


def stacked_shares(
    x: Sequence[Any], table: pd.DataFrame, components: Sequence[str], *, names: Sequence[str] | None = None
) -> go.Figure:
    """Shares of components stacked on each other, a bar for each row of a table; ``names`` of the bars for hovering."""
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
    return figure.update_yaxes(title="share of the variance of the scores")


def plot_deposit(
    table: pd.DataFrame,
    *,
    better: Literal["lower", "higher"],
    sufficient: Iterable[SufficientHeads] = (),
    title: str | None = None,
) -> go.Figure:
    """Plot how much worse the model is without each head, the heads with the largest drops first.

    According to arXiv 2505.13027, in models with RoPE trained on a position-sensitive task one head of the first layer
    does nearly all of the positional work, the *deposit*.

    Args:
        table: of ``head_ablation``.
        better: which values of its metric are better: ``"lower"``, as of a loss, or ``"higher"``, as of an accuracy.
        sufficient: results of ``sufficient_heads`` on the same model.
        title: of the figure; default says what it shows.

    Returns:
        A figure with a bar for each head: by how much the metric is worse without it, in the units of the metric. A
        bar below 0 is a head without which the metric is better. The head with the largest drop is labelled. Bars have
        the standard errors of a column ``effect_se``, if the table has one. With ``sufficient``, a second panel:
        accuracy with the most important heads alone against their number, and the sufficient set as a larger marker.

    Raises:
        ValueError: a table without ``layer``, ``head`` and ``effect``, or without rows; several rows for a head; an
            unknown option; ``sufficient`` that is no result of ``sufficient_heads``.

    Example:
        >>> from tl_posdisent import demo_tokens, head_ablation, load_demo_model
        >>> from tl_posdisent.viz import plot_deposit
        >>> table = head_ablation(load_demo_model(), demo_tokens(length=64), layers=[4], progress=False)
        >>> figure = plot_deposit(table, better="lower")
        >>> bool(figure.data[0].y[5] == table["effect"][5])
        True
        >>> figure.layout.annotations[0].text == f"layer 4, head {table['effect'].argmax()}"
        True
    """
    check_choice("better", better, ("lower", "higher"))
    sufficient = list(sufficient)
    for found in sufficient:
        if not isinstance(found, SufficientHeads):
            raise ValueError(f"sufficient must hold results of sufficient_heads, got {type(found).__name__}")
    table = check_table(table, ["layer", "head"], ["effect"], "head_ablation")
    columns = [column for column in ("effect", "effect_se") if column in table]
    means = mean_over_texts(table, ["layer", "head"], columns)
    worse = means["effect"] if better == "lower" else -means["effect"]
    most, names = int(worse.argmax()), head_names(means)
    figure = go.Figure().set_subplots(rows=2 if sufficient else 1, vertical_spacing=0.2)
    figure.add_bar(
        x=head_axis(means),
        y=worse.to_numpy(),
        error_y=_errors(means, "effect"),
        marker={"color": [RUST if n == most else BLUE for n in range(len(worse))], "line": {"width": 0}},
        name="",
        showlegend=False,
        customdata=names,
        hovertemplate="%{customdata}: %{y:.4g}",
    )
    figure.add_annotation(x=most, y=max(worse[most], 0), text=names[most], showarrow=False, yanchor="bottom")
    figure.update_xaxes(**head_ticks(means), row=1, col=1)
    figure.update_yaxes(
        title="how much worse without the head<br>(units of the metric: nats for the loss)", row=1, col=1
    )
    if sufficient:
        _add_paths(figure, sufficient)
    return add_title(figure, title, "Effect of removing each head")


_ALONE = {"rotation": "if only these rotate", "attention": "if only these attend"}


def _add_paths(figure: go.Figure, sufficient: Sequence[SufficientHeads]) -> None:
    """The second panel of ``plot_deposit``."""
    for found, colour in zip(sufficient, (RUST, BLUE, GREY), strict=False):
        path = found.path.sort_values("heads")
        sizes = [12 if n == len(found.heads) else 6 for n in path["heads"]]
        figure.add_scatter(
            x=path["heads"].to_numpy(),
            y=path["accuracy"].to_numpy(),
            name=_ALONE[found.by],
            mode="lines+markers",
            line={"color": colour},
            marker={"size": sizes},
            row=2,
            col=1,
        )
    figure.update_xaxes(title="heads kept", row=2, col=1)
    figure.update_yaxes(title="accuracy (share)", rangemode="tozero", row=2, col=1)


def plot_substitution(
    table: pd.DataFrame,
    measure: Literal["change", "kl", "loss"] = "change",
    *,
    scope: Literal["all", "layer"] = "all",
    title: str | None = None,
) -> go.Figure:
    """Plot the added loss if scores are replaced by some of their components.

    Args:
        table: of ``additive_substitution``.
        measure: the column to draw: ``"change"``, the loss beyond that of the unmodified model, ``"kl"`` or
            ``"loss"``, all in nats per token.
        scope: ``"all"``, everything replaced at once, with a bar for each subset of the components and each control,
            the worst on top; or ``"layer"``, one layer at a time, the additive fit beside the controls.
        title: of the figure; default says what it shows.

    Returns:
        A figure. Bars have the standard errors of a column such as ``change_se``, if the table has one.

    Raises:
        ValueError: a table without ``scope``, ``layer``, ``put_in``, ``keep`` and ``measure``, or without rows of that
            scope; an unknown option.

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
    check_choice("scope", scope, ("all", "layer"))
    table = check_table(table, ["scope", "layer", "put_in", "keep"], [measure], "additive_substitution")
    rows = table[table["scope"] == scope]
    if rows.empty:
        raise ValueError(f'table must have rows of scope "{scope}", as made by additive_substitution, got none')
    unit = title_of(measure, table)
    figure = _each_layer(rows, measure, unit) if scope == "layer" else _everything(rows, measure, unit)
    where = "everywhere" if scope == "all" else "in one layer at a time"
    return add_title(figure, title, f"Scores replaced by components of their additive fit, {where}")


def _everything(rows: pd.DataFrame, measure: str, title: str) -> go.Figure:
    """Draw a bar for each run, named by its replacement, the highest loss on top."""
    ranked = rows.sort_values(measure, kind="stable")
    names = ranked["keep"].str.replace("+", " + ", regex=False)
    names = names.mask(names == "mean", "uniform attention").mask(ranked["put_in"] == "zero", "no attention output")
    ranked["name"] = names.mask(ranked["put_in"] == "shuffled fit", names + ", shuffled text")
    figure = go.Figure()
    for put_in, colour in _PUT_IN_COLOURS.items():
        chosen = ranked[ranked["put_in"] == put_in]
        bars = figure.add_bar(
            x=chosen[measure].to_numpy(), y=chosen["name"].to_numpy(), name=put_in, marker={"color": colour}
        )
        bars.data[-1].update(orientation="h", error_x=_errors(chosen, measure))
    figure.update_traces(texttemplate="%{x:.2f}", textposition="outside", cliponaxis=False)
    figure.update_layout(height=140 + 22 * len(ranked), barmode="overlay", legend={"title": "scores replaced by"})
    low, high = min(ranked[measure].min(), 0) * 1.15, max(ranked[measure].max(), 0) * 1.15 or 1  # room for numbers
    figure.update_xaxes(title=title, range=[low, high])
    order = {"categoryorder": "array", "categoryarray": ranked["name"].to_numpy()}
    return figure.update_yaxes(title="components that are kept", automargin=True, showgrid=False, **order)


def _each_layer(rows: pd.DataFrame, measure: str, title: str) -> go.Figure:
    figure = go.Figure().update_layout(legend={"title": "scores replaced by"})
    for put_in, colour in _PUT_IN_COLOURS.items():
        chosen = rows[rows["put_in"] == put_in].sort_values("layer")
        x, errors = whole(chosen["layer"]), _errors(chosen, measure)
        figure.add_bar(x=x, y=chosen[measure].to_numpy(), name=put_in, marker={"color": colour}, error_y=errors)
    figure.update_xaxes(title="layer", type="category", showgrid=False)
    return figure.update_yaxes(title=title)


def _errors(table: pd.DataFrame, measure: str) -> dict[str, Any] | None:
    """Error bars of a column such as ``effect_se``, if the table has one."""
    if f"{measure}_se" not in table:
        return None
    return {"type": "data", "array": table[f"{measure}_se"].to_numpy(dtype=float), "thickness": 1, "width": 2}
