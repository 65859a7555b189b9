"""How much of the loss each head of the demo model restores with its own positions."""

from __future__ import annotations

import plotly.graph_objects as go
import torch

import tl_posdisent as tp

SIZE = (680, 360)


def figure() -> go.Figure:
    """Draw the picture."""
    model = tp.load_demo_model()
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    table = tp.position_patching(model, tp.demo_tokens(length=128), order, progress=False)
    return tp.plot_heads(table, "effect", signed=True)
