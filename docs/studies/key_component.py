"""What stays and what moves where all pairs of a layer have one distance: the key component, and the mean score.

A layer's own distances do not change its queries and keys, so its scores at a distance follow from one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from shared.curves_of_heads import correlation, shifts
from shared.rows import Row, row
from shared.texts import Source, how_many, parts
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.rope import rotate

TEXTS, LENGTH = 4, 256
DISTANCES = (1, 8, 64)


def rows(model: Any, source: Source) -> Iterator[Row]:
    """Correlations of components, mean and median over heads, trained and with random weights."""
    texts = parts(model, source, how_many(model, source, TEXTS), LENGTH)
    for name, weights in {"trained": model, "random": next(tp.random_control(model, [0]))}.items():
        tables = [pd.concat(tp.capture(weights, text[None], of_heads)) for text in texts]
        for what, by_text in (("", [t.mean() for t in tables]), ("median head, ", [t.median() for t in tables])):
            for column, values in pd.DataFrame(by_text).items():
                yield row(f"{column}, {what}{name}", torch.tensor(values.to_numpy()), LENGTH, "fit_additive(scores)")


def of_heads(layer: Any) -> pd.DataFrame:
    """One row per head: correlations of key components in the layer's run and at distances, and of the mean score at a
    distance with the distance component."""
    near, far = DISTANCES[0], DISTANCES[-1]
    columns = {}
    for sinks, what in ((0, "key component"), (1, "key component without the first token")):
        fit = tp.fit_additive(layer.scores, sinks=sinks)
        own, weights = fit.key[0], fit.mask.double().sum(-2)
        keys = {d: tp.fit_additive(scores_at(layer, d), sinks=sinks).key[0] for d in DISTANCES}
        for d in DISTANCES:
            columns[f"{what}, own and distance {d}"] = correlation(own, keys[d], weights)
        columns[f"{what}, distances {near} and {far}"] = correlation(keys[near], keys[far], weights)
        columns[f"{what}, own and distance {far} of another head"] = correlation(own, keys[far].roll(1, 0), weights)
        if not sinks:
            columns |= shifts(mean_scores(layer), fit.distance[0])
    return pd.DataFrame(columns)


def scores_at(layer: Any, d: int) -> Tensor:
    """``[1, head, query, key]``: the layer's scores where every pair has distance d."""
    places, rotary = torch.zeros(layer.q.shape[1]), layer.spec.rotary
    scores: Tensor = layer.spec.score(rotate(layer.q, places + d, rotary), rotate(layer.k, places, rotary))
    return scores


def mean_scores(layer: Any) -> Tensor:
    """``[head, distance]``: the mean score of each query with the keys it sees, where all have one distance."""
    seen = torch.ones(layer.q.shape[1], layer.q.shape[1]).tril().bool()
    return torch.stack([scores_at(layer, d)[0, :, seen].double().mean(1) for d in range(len(seen))], 1)
