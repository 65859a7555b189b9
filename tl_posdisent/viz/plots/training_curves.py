"""Line charts over training steps: loss and accuracy, and measures of heads."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from tl_posdisent.synthetic.training.train import TrainRun
from tl_posdisent.viz.palette import BLUE, ORANGE, line_style

from .axis_titles import add_title, natural_range, title_of, without_unit
from .table_checks import check_table


def plot_training(run: TrainRun | pd.DataFrame, *, title: str | None = None) -> go.Figure:
    """Plot training and test loss and accuracy over training steps.

    Args:
        run: the result of ``train``, or its ``metrics``.
        title: of the figure; default says what it shows.

    Returns:
        A figure of two panels. A training point is the mean since the previous point, with dropout; a test point is
        measured with the model at that step.

    Raises:
        ValueError: neither a run nor a table with ``step``, ``loss``, ``accuracy``, ``test_loss`` and
            ``test_accuracy``; no rows.

    Example:
        >>> from tl_posdisent.synthetic import SyntheticConfig, SyntheticModel, TrainConfig, TriggerCount, train
        >>> from tl_posdisent.viz import plot_training
        >>> task = TriggerCount(d_vocab=8, n_triggers=1, max_count=3, min_length=4, max_length=6, n_ctx=6)
        >>> shape = dict(d_vocab=task.d_vocab, n_ctx=task.n_ctx, n_out=task.n_out, pad_id=task.pad_id)
        >>> model = SyntheticModel(SyntheticConfig(n_layers=1, d_model=16, n_heads=2, d_mlp=16, **shape))
        >>> config = TrainConfig(epochs=1, batch_size=32, n_train=320, n_test=100, lr=1e-2, log_every=5)
        >>> run = train(model, task, config, progress=False)
        >>> loss, test_loss, accuracy, test_accuracy = plot_training(run).data
        >>> loss.x.tolist(), float(test_accuracy.y[-1]) == run.test_accuracy
        ([5, 10], True)
    """
    measures = ("loss", "accuracy")
    table = run.metrics if isinstance(run, TrainRun) else run
    numbers = ["step", *measures, *(f"test_{measure}" for measure in measures)]
    table = check_table(table, [], numbers, "train, in TrainRun.metrics")
    figure = go.Figure().set_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.06)
    for row, measure in enumerate(measures, start=1):
        for name, column, colour in (("training", measure, BLUE), ("test", f"test_{measure}", ORANGE)):
            there = table.dropna(subset=column)
            x, y = there["step"].to_numpy(), there[column].to_numpy()
            mode = "lines" if name == "training" and len(there) > 1 else "lines+markers"
            figure.add_scatter(x=x, y=y, name=name, mode=mode, line={"color": colour}, row=row, col=1)
            figure.data[-1].update(legendgroup=name, showlegend=row == 1)
    figure.update_yaxes(title="loss (nats per answer)", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="accuracy (share)", range=[0, 1.01], row=2, col=1)
    figure.update_xaxes(title="training step", row=2, col=1)
    return add_title(figure, title, "Loss and accuracy during training")


def plot_dynamics(table: pd.DataFrame, value: str = "r_two_axis", *, title: str | None = None) -> go.Figure:
    """Plot a measure of every head, or of every layer, over training steps.

    Args:
        table: from ``dynamics``, or any other table by head with a column ``step``; or from ``gradient_margins``.
        value: the column to draw.
        title: of the figure; default names the measure.

    Returns:
        A figure with a panel for each layer and a line for each of its heads, all panels on the same axes. Of a table
        with one row per step and layer, one panel with a line for each layer.

    Raises:
        ValueError: a table without ``step``, ``layer`` or this column, without rows, or with several rows for a step of
            one head.

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
        raise ValueError(f"table must have one row for each {', '.join(key)}, got several: select rows first")
    table = table.sort_values(key)
    layers = sorted(table["layer"].unique())
    titles = [f"layer {int(layer)}" for layer in layers] if by_head else None
    columns = len(layers) if by_head else 1
    figure = go.Figure().set_subplots(
        rows=1, cols=columns, shared_yaxes=True, subplot_titles=titles, horizontal_spacing=0.1 / columns
    )
    line_of, lines = ("head", ["layer", "head"]) if by_head else ("layer", ["layer"])
    named = {number: n for n, number in enumerate(sorted(table[line_of].unique()))}
    for _, rows in table.groupby(lines):
        number = rows[line_of].iloc[0]
        style = line_style(named[number])
        column = layers.index(rows["layer"].iloc[0]) + 1 if by_head else 1
        x, y = rows["step"].to_numpy(), rows[value].to_numpy()
        first = not any(trace.legendgroup == str(number) for trace in figure.data)
        figure.add_scatter(x=x, y=y, name=f"{line_of} {int(number)}", mode="lines", line=style, row=1, col=column)
        figure.data[-1].update(legendgroup=str(number), showlegend=first)
    low, high = float(table[value].min()), float(table[value].max())
    natural = natural_range(value, low, high)
    figure.update_yaxes(range=natural) if natural else figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title=title_of(value, table), row=1, col=1).update_xaxes(title="training step")
    return add_title(figure, title, f"{without_unit(title_of(value, table))}, during training")
