"""Held-out r of SmolLM2-135M by layer."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from shared.rows import TABLES

import tl_posdisent as tp

SIZE = (680, 300)


def figure() -> go.Figure:
    """Draw curves as wide as a notebook."""
    table = pd.read_csv(TABLES / "smollm2" / "heads.csv")
    return tp.plot_heads(table, "r_held_out", by="layer", title="SmolLM2-135M: held-out r by layer")
