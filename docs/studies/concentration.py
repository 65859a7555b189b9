"""Why are trained scores additive? r of a head's scores beside that of scores which no head computes, from its own
queries and keys: taken from two texts, or drawn from a normal distribution."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from shared.rows import Row, area, row
from shared.texts import Source, how_many, parts
from torch import Tensor

import tl_posdisent as tp

TEXTS, LENGTH, DRAWS = 8, 256, 500
INDUCTION = 0.2  # attention from which a head is an induction head
HEAD = ["layer", "head"]


def rows(model: Any, source: Source) -> Iterator[Row]:
    """r by the origin of queries and keys, over texts; the AUC of 1 - r for induction heads, over heads."""
    texts = parts(model, source, how_many(model, source, TEXTS), LENGTH)
    copy, read = next(tp.random_control(model, [0])), partial(of_layer, torch.Generator().manual_seed(0))
    table = tp.additivity(model, texts, controls=["foreign keys"], progress=False)
    random = tp.additivity(copy, texts, progress=False).assign(scores="random weights")
    table = pd.concat([table, random, *tp.capture(model, texts, read)])
    labels = pd.concat(tp.head_labels(model, seed=seed, seeds=0, progress=False) for seed in range(3))
    matching = labels.groupby(HEAD)["induction"].mean().reset_index()
    for name, chosen in table.groupby("scores", sort=False):
        by_text = torch.tensor(chosen.groupby("batch")["r"].mean().to_numpy())
        yield row(f"r, {name}", by_text, LENGTH, "fit_additive(scores)")
        by_head = chosen.groupby(HEAD)["r"].mean().reset_index().merge(matching)
        if (has := (by_head["induction"] > INDUCTION).to_numpy()).sum() > 1:
            values, over = 1 - by_head["r"].to_numpy(), f"{has.sum()} of {len(has)} heads"
            name = f"AUC of 1 - r for induction heads, {name}"
            yield Row(name, area(values, has), bootstrap(values, has), over, LENGTH, "fit_additive(scores)")


def of_layer(generator: torch.Generator, layer: Any) -> pd.DataFrame:
    """r of a layer's queries with keys of another text, and of queries and keys from a normal distribution."""
    at, tables = torch.arange(layer.q.shape[1]), []
    origins = {"keys of another text": (layer.q, layer.k.roll(1, 0))}
    origins["normal distribution"] = normal(layer.q, generator), normal(layer.k, generator)
    for name, (q, k) in origins.items():
        r = tp.fit_additive(
            layer.spec.score(layer.spec.rotated(q, at), layer.spec.rotated(k, at)), window=layer.spec.window
        ).r
        table = (
            pd.DataFrame(r.numpy()).rename_axis("batch").reset_index().melt("batch", var_name="head", value_name="r")
        )
        tables.append(table.assign(layer=layer.layer, scores=name))
    return pd.concat(tables)


def normal(x: Tensor, generator: torch.Generator) -> Tensor:
    """Draw vectors with the mean and the covariance of those of each text and head, ``[text, pos, head, d_head]``."""
    mean = x.mean(1, keepdim=True)
    drawn = torch.randn(x.shape[0], x.shape[1], x.shape[1], generator=generator) / x.shape[1] ** 0.5
    return mean + torch.einsum("bnp,bphd->bnhd", drawn, x - mean)


def bootstrap(values: np.ndarray, has: np.ndarray) -> float:
    """The standard error of the area, by drawing heads with and without the label again."""
    generator, groups = np.random.default_rng(0), [np.flatnonzero(has == label) for label in (True, False)]
    drawn = [np.concatenate([generator.choice(group, len(group)) for group in groups]) for _ in range(DRAWS)]
    return float(np.std([area(values[chosen], has[chosen]) for chosen in drawn]))
