"""The gradient for a distance profile of each head, while a small model learns."""

from __future__ import annotations

import copy

import plotly.graph_objects as go

import tl_posdisent as tp

SIZE = (860, 360)


def figure() -> go.Figure:
    """Draw the picture."""
    small = tp.synthetic.preset("small")
    model, task = small.model("rope", "distance"), small.tasks["distance"]
    models = {0: copy.deepcopy(model)}

    def keep(step: int, model: tp.synthetic.SyntheticModel) -> None:
        if step % 25 == 0:
            models[step] = copy.deepcopy(model)

    tp.synthetic.train(model, task, small.train_config("distance"), on_step=keep, progress=False)
    return tp.viz.plot_dynamics(tp.synthetic.dynamics(models, task, progress=False), "norm_of_mean")
