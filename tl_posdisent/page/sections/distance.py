"""The section ``distance``: the distance component of each head's scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pandas as pd
from torch import Tensor

from tl_posdisent.additive.fit import fit_additive
from tl_posdisent.models.capture import for_each_scores, of_heads
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.page.drawing.markup import figure, render
from tl_posdisent.page.measuring.distances import shown_distances
from tl_posdisent.page.measuring.measurement import HEAD, Measurement, Settings
from tl_posdisent.page.measuring.subject import TOKENS, Subject
from tl_posdisent.page.sections.section import Content, Measured, Section
from tl_posdisent.utils.tables import number_heads
from tl_posdisent.viz.plots.curves import plot_distance

_LAYERS = 12
"""Maximum number of layers whose profiles are drawn."""


def _measure(subject: Subject, settings: Settings, _: Measured) -> Measurement:
    """Fit each head's distance component to all texts, as long as the shortest of them.

    The table has the columns ``layer``, ``head``, ``distance``, ``value`` and ``cells``. Layers that are not drawn have
    the distances of the atlas only, so that the table of a large model is small.
    """
    part = subject.cut(min(subject.lengths), TOKENS)
    tables: list[pd.DataFrame] = []
    n_tokens, drawn = part.tokens.shape[1], drawn_layers(part.specs)

    def fit_layer(spec: AttentionSpec, scores: Tensor) -> None:
        heads = sorted(part.heads[spec.layer])
        mask: Literal["causal", "full"] = "causal" if spec.causal else "full"
        fit = fit_additive(of_heads(scores, heads), pool=True, mask=mask, window=spec.window)
        table = number_heads(fit.to_frame("distance"), heads).assign(layer=spec.layer)
        if spec.layer not in drawn:
            table = table[table["distance"].isin(shown_distances(table["distance"]))]
        tables.append(table.assign(cells=n_tokens - table["distance"].abs()))

    for_each_scores(part.model, part.tokens, part.specs, fit_layer)
    table = pd.concat(tables, ignore_index=True)[[*HEAD, "distance", "value", "cells"]]
    return Measurement(table, read=part)


def drawn_layers(specs: Sequence[AttentionSpec]) -> list[int]:
    """Choose the layers whose distance profiles are drawn, at equal steps."""
    places = np.unique(np.linspace(0, len(specs) - 1, _LAYERS).round().astype(int))
    return [specs[place].layer for place in places]


def _passes(subject: Subject, settings: Settings) -> float:
    return subject.cut(min(subject.lengths), TOKENS).n_run


def _show(subject: Subject, measurement: Measurement) -> Content:
    layers = drawn_layers(subject.specs)
    figures = [
        figure(plot_distance(rows.drop(columns="layer")), f"Distance component of the heads of layer {layer}")
        for layer, rows in measurement.trained.groupby("layer")
        if layer in layers
    ]
    return Content(render("sections/distance", figures=figures, drawn=len(layers), layers=len(subject.layers)))


DISTANCE = Section("distance", "Distance profiles", _measure, _passes, _show)
