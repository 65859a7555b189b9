"""Distance components of eight heads of the demo model."""

from __future__ import annotations

import plotly.graph_objects as go

import tl_posdisent as tp

SIZE = (720, 400)


def figure() -> go.Figure:
    """Draw the picture."""
    model = tp.load_demo_model()
    _, cache = model.run_with_cache(tp.demo_tokens(length=512))
    wavelengths = tp.read_attention(model, 3).rotary.wavelengths.tolist()
    return tp.plot_distance(tp.fit_additive(cache["attn_scores", 3]), wavelengths=wavelengths)
