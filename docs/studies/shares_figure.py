"""Variance decomposition of the scores of the demo model at controlled distances."""

from __future__ import annotations

import plotly.graph_objects as go
from shared.texts import demo_texts

import tl_posdisent as tp

SIZE = (860, 400)


def figure() -> go.Figure:
    """Draw the picture."""
    model = tp.load_demo_model()
    return tp.plot_shares(tp.controlled_distance(model, demo_texts(7, 450), sinks=50, progress=False))
