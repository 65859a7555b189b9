"""Correct answers to questions against tokens out of place, of the demo and the story model."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots
from shared.rows import TABLES

from tl_posdisent.viz.palette import HUES

SIZE = (1000, 340)
TASKS = {"last_word": "last word", "next_sentence": "next sentence"}


def figure() -> go.Figure:
    """Draw ``tables/downstream.csv``."""
    table = pd.read_csv(TABLES / "downstream.csv")
    cells = [(model, task) for model in table["model"].unique() for task in TASKS]
    titles = [f"{model.split()[0]}: {TASKS[task]}" for model, task in cells]
    figure = make_subplots(rows=1, cols=len(cells), subplot_titles=titles, shared_yaxes=True)
    for column, (model, task) in enumerate(cells, start=1):
        for number, kind in enumerate(table["kind"].unique()):
            rows = table[(table["model"] == model) & (table["task"] == task) & (table["kind"] == kind)]
            figure.add_scatter(
                x=rows["fraction"] + 0.012 * (number - 1),  # beside each other
                y=rows["downstream"],
                error_y={"array": rows["downstream_se"], "thickness": 1},
                name=kind,
                mode="lines+markers",
                line={"color": HUES[number]},
                showlegend=column == 1,
                legendgroup=kind,
                row=1,
                col=column,
            )
        figure.add_hline(y=0.5, line={"dash": "dot", "color": "grey"}, row=1, col=column)
    figure.update_xaxes(title="tokens out of place", tickformat=".0%")
    return figure.update_yaxes(title="share of correct answers", row=1, col=1)
