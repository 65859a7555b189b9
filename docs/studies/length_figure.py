"""Loss and largest score of the demo model by position, as it is and with two remedies."""

from __future__ import annotations

import plotly.graph_objects as go

import tl_posdisent as tp

SIZE = (720, 460)


def figure() -> go.Figure:
    """Draw the picture."""
    model = tp.load_demo_model()
    tokens, edges = tp.demo_tokens(length=1537), [64, *range(128, 1537, 128)]
    ways = {"as it is": None, "Λ-shaped window": tp.lambda_mask(model, 4, 256, 256)}
    ways["positions / 3"] = tp.position_interpolation(model, 3)
    tables = {
        name: tp.length_generalization(model, tokens, edges, hooks, in_range=512, progress=False)
        for name, hooks in ways.items()
    }
    return tp.viz.plot_length(tables, ["loss", "largest_score"], in_range=512)
