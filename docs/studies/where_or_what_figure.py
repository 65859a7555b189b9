"""The where–what plane of SmolLM2-135M."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from shared.rows import TABLES

from tl_posdisent.viz import plot_where_or_what

SIZE = (760, 560)


def figure() -> go.Figure:
    """Draw the picture, from the table that the study ``where_or_what`` writes."""
    heads = pd.read_csv(TABLES / "smollm2" / "where_or_what.csv")
    return plot_where_or_what(heads, width=SIZE[0], height=SIZE[1])
