"""The correlation of each head's scores with the additive fit, in the demo model."""

from __future__ import annotations

import plotly.graph_objects as go

import tl_posdisent as tp

SIZE = (680, 360)


def figure() -> go.Figure:
    """Draw the picture."""
    model = tp.load_demo_model()
    return tp.plot_heads(tp.additivity(model, tp.demo_tokens(length=512), progress=False), "r")
