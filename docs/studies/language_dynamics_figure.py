"""Two-axis r of each head of the demo model, in training."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from shared.rows import TABLES

import tl_posdisent as tp

SIZE = (960, 360)


def figure() -> go.Figure:
    """Draw the picture."""
    table = pd.read_csv(TABLES / "language_dynamics.csv")
    return tp.viz.plot_dynamics(table[table["step"] > 0], "r_two_axis").update_xaxes(type="log", dtick=1)
