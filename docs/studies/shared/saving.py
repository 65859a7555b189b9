"""Write a plotly figure as an SVG file. Needs ``pip install kaleido`` and a Chromium or Chrome."""

from __future__ import annotations

import re
from pathlib import Path

import plotly.graph_objects as go

FIGURES = Path(__file__).parents[2] / "figures"


def save(figure: go.Figure, name: str, width: int, height: int) -> None:
    """White, so that it reads in a light and in a dark theme; the same figure always gives the same file."""
    figure.update_layout(template="plotly_white", font={"size": 13}, margin={"l": 70, "r": 20, "t": 60, "b": 60})
    figure.update_yaxes(automargin=True).update_xaxes(automargin=True)
    for number, trace in enumerate(figure.data):
        trace.uid = f"{number:06d}"  # else drawn at random, and every run would write another file
    svg = figure.to_image("svg", width=width, height=height).decode()
    drawn = re.search(r'id="defs-([0-9a-f]+)"', svg)  # likewise
    if drawn:
        svg = svg.replace(drawn[1], name)
    (FIGURES / f"{name}.svg").write_text(svg + "\n", encoding="utf-8")
