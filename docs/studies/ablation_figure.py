"""The loss added by resampling each head of the demo model."""

from __future__ import annotations

import plotly.graph_objects as go
from shared.texts import demo_texts

import tl_posdisent as tp

SIZE = (680, 360)


def figure() -> go.Figure:
    """Draw the picture."""
    model = tp.load_demo_model()
    return tp.plot_heads(
        tp.head_ablation(model, demo_texts(4, 128), mode="resample", progress=False), "effect", signed=True
    )
