"""The loss of the demo model where the scores keep only some components."""

from __future__ import annotations

import plotly.graph_objects as go

import tl_posdisent as tp

SIZE = (760, 560)


def figure() -> go.Figure:
    """Draw the picture."""
    model = tp.load_demo_model()
    return tp.viz.plot_substitution(tp.additive_substitution(model, tp.demo_tokens(length=128), progress=False))
