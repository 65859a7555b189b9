"""The loss added by words that change places, by the fraction of words."""

from __future__ import annotations

import plotly.graph_objects as go
from shared.texts import demo_texts

import tl_posdisent as tp

SIZE = (680, 380)


def figure() -> go.Figure:
    """Draw the picture."""
    model = tp.load_demo_model()
    fractions = (0, 0.05, 0.1, 0.2, 0.35, 0.5)
    table = tp.perturbation_curve(model, demo_texts(6, 500), fractions=fractions, seeds=3, unit="word", progress=False)
    return tp.viz.plot_perturbation(table)
