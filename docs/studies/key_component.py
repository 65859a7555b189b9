"""What stays and what moves where all pairs of a layer have one distance: the key component, and the mean score.

A layer's own distances do not change its queries and keys, so its scores at a distance follow from one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from shared.rows import Row, row
from shared.texts import Source, how_many, parts
from torch import Tensor

import tl_posdisent as tp

TEXTS, LENGTH = 4, 256


def rows(model: Any, source: Source) -> Iterator[Row]:
    """Correlations of components, mean and median over heads, trained and with random weights."""
    texts = parts(model, source, how_many(model, source, TEXTS), LENGTH)
    for name, weights in {"trained": model, "random": next(tp.random_control(model, [0]))}.items():
        tables = [pd.concat(tp.capture(weights, text[None], of_heads)) for text in texts]
        for what, by_text in (("", [t.mean() for t in tables]), ("median head, ", [t.median() for t in tables])):
            for column, values in pd.DataFrame(by_text).items():
                yield row(f"{column}, {what}{name}", torch.tensor(values.to_numpy()), LENGTH, "fit_additive(scores)")


def of_heads(layer: Any) -> pd.DataFrame:
    """One row per head: the correlation of its key component with those at one distance, and how the mean score at a
    distance follows the distance component up to half of the text: correlation, and slope near and far."""
    fit = tp.fit_additive(layer.scores)
    visible, columns = fit.mask.double().sum(-2), {}
    for d in (1, 64):
        at_distance = tp.fit_additive(scores_at(layer, d)).key[0]
        columns[f"key component, own and distance {d}"] = correlation(fit.key[0], at_distance, visible)
    seen, half = fit.mask, len(fit.mask) // 2
    means = torch.stack([scores_at(layer, d)[0, :, seen].double().mean(1) for d in range(half)], 1)
    for where, start, stop in (("", 1, half), (" below 16", 1, 16), (" from 16 on", 16, half)):
        a, b = (without_line(x[:, start:stop]) for x in (means, fit.distance[0]))
        what = f"mean score at a distance and distance component, distances{where}"
        columns[f"{what}, correlation"] = correlation(a, b, torch.ones(stop - start))
        columns[f"{what}, slope"] = (a * b).sum(-1) / (b * b).sum(-1)
    return pd.DataFrame(columns)


def scores_at(layer: Any, d: int) -> Tensor:
    """``[1, head, query, key]``: the layer's scores where every pair has distance d."""
    places = torch.zeros(layer.q.shape[1])
    scores: Tensor = layer.spec.score(layer.spec.rotated(layer.q, places + d), layer.spec.rotated(layer.k, places))
    return scores


def without_line(x: Tensor) -> Tensor:
    """``[head, distance]`` minus each head's line of least squares, which the fit cannot tell from its other parts."""
    line = torch.stack([torch.ones(x.shape[1]), torch.arange(x.shape[1])], 1).to(x)
    return x - (line @ torch.linalg.lstsq(line, x.T).solution).T


def correlation(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """``[head]``: weighted correlations over the last axis."""
    x, y = (v - (v * weights).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True) for v in (x, y))
    return (weights * x * y).sum(-1) / ((weights * x * x).sum(-1) * (weights * y * y).sum(-1)).sqrt()
