"""Held-out r of every head of SmolLM2-135M."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from shared.rows import TABLES

import tl_posdisent as tp

SIZE = (340, 620)


def figure() -> go.Figure:
    """Draw a map as narrow as a column of a paper."""
    return tp.plot_heads(pd.read_csv(TABLES / "smollm2" / "heads.csv"), "r_held_out", title="SmolLM2-135M")
