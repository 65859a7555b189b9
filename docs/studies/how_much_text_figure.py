"""Error and rank correlation of measures of every head of SmolLM2-135M, against the tokens read."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots
from shared.rows import TABLES

SIZE = (900, 420)
NAMES = {"r": "r of one text", "r_held_out": "r, profile of other texts"}
KL = {"mean output": "KL, mean output", "distance 5": "KL, every distance 5"}
COLOURS = ("#999999", "#0072b2", "#d55e00", "#cc79a7")
SHOWN = 16  # draws of labels in the figure


def figure() -> go.Figure:
    """Error in units of the spread over heads, and rank correlation, against tokens: a colour for each measure."""
    scores, divergences = (pd.read_csv(TABLES / "smollm2" / f"{name}.csv") for name in ("text_needed", "draws_needed"))
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    table = pd.concat([scores, divergences[divergences["draws"] == SHOWN]])
    table = table.assign(relative=table["error"] / table["spread"])
    for (name, title), colour in zip((NAMES | KL).items(), COLOURS, strict=True):
        rows = table[table["measure"] == name]
        style = {"mode": "lines+markers", "line": {"color": colour}, "name": title}
        for place, y in enumerate(("relative", "rank"), 1):
            figure.add_trace(go.Scatter(x=rows["tokens"], y=rows[y], showlegend=place == 1, **style), row=1, col=place)
    figure.update_xaxes(title="tokens", type="log", tickvals=[128, 256, 512, 1024])
    figure.update_yaxes(title="error / standard deviation over heads", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="rank correlation of two sets", row=1, col=2)
    return figure.update_layout(title="Two measurements of every head of SmolLM2-135M, on different texts")
