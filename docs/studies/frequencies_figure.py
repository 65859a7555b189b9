"""The share of the distance in the scores, by wavelength and head of the demo model."""

from __future__ import annotations

import plotly.graph_objects as go
from shared.texts import demo_texts

import tl_posdisent as tp

SIZE = (860, 360)


def figure() -> go.Figure:
    """Draw the picture."""
    model = tp.load_demo_model()
    return tp.viz.plot_subspaces(tp.subspace_patterns(model, demo_texts(7, 450), sinks=50, progress=False), "distance")
