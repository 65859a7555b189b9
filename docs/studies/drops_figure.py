"""The accuracy lost without each head, of small models with five encodings of position."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

import tl_posdisent as tp

SIZE = (960, 280)


def figure() -> go.Figure:
    """Draw the models of the preset ``small``, which are trained first if necessary."""
    runs = tp.synthetic.train_preset(
        tp.synthetic.preset("small"), tasks=["distance"], folder=Path("out/synthetic/trainings"), progress=False
    )
    names = {"rope": "RoPE", "alibi": "ALiBi", "none": "none", "learned": "learned absolute", "mla": "MLA"}
    figure = make_subplots(rows=1, cols=len(names), subplot_titles=list(names.values()), shared_yaxes=True)
    for column, name in enumerate(names, start=1):
        run = runs[name, "distance", 0]
        split = run.split()
        samples = split.test_tokens[:1000], split.test_labels[:1000]
        table = tp.synthetic.head_drops(run.model, *samples, progress=False)
        heads = tp.plot_heads(table.assign(drop=-table["effect"]), "drop", signed=True, limits=(-0.7, 0.7))
        trace = heads.data[0].update(showscale=column == len(names), colorbar_title="accuracy lost")
        figure.add_trace(trace, row=1, col=column)
    figure.update_yaxes(autorange="reversed").update_xaxes(title="head")
    return figure.update_yaxes(title="layer", row=1, col=1)
