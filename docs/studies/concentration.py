"""Why are trained scores additive? r of a head's scores beside that of scores which no head computes, from its own
queries and keys: moved to other positions, taken from two texts, or drawn from a normal distribution."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from shared.origins_of_scores import of_layer
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
    copy = next(tp.random_control(model, [0]))
    table = pd.concat(
        [measure(model, texts), measure(copy, texts).query("scores == 'own'").assign(scores="random weights")]
    )
    foreign = tp.additivity(model, texts, controls=["foreign keys"], progress=False)
    table = pd.concat([table, foreign[foreign["scores"] == "foreign keys"][[*HEAD, "batch", "scores", "r"]]])
    matching = induction(model)
    for name, chosen in table.groupby("scores", sort=False):
        by_text = torch.tensor(chosen.groupby("batch")["r"].mean().to_numpy())
        yield row(f"r, {name}", by_text, LENGTH, "fit_additive(scores)")
        by_head = chosen.groupby(HEAD)["r"].mean().reset_index().merge(matching)
        if (has := (by_head["induction"] > INDUCTION).to_numpy()).sum() > 1:
            values, over = 1 - by_head["r"].to_numpy(), f"{has.sum()} of {len(has)} heads"
            name = f"AUC of 1 - r for induction heads, {name}"
            yield Row(name, area(values, has), bootstrap(values, has), over, LENGTH, "fit_additive(scores)")


def measure(model: Any, texts: Tensor) -> pd.DataFrame:
    """One row per text, head and origin of the scores: r."""
    with torch.no_grad():
        return pd.concat(tp.capture(model, texts, partial(of_layer, torch.Generator().manual_seed(0))))


def induction(model: Any) -> pd.DataFrame:
    """One row per head: its attention to the token after the last occurrence of its own; mean of three draws."""
    options: dict[str, Any] = {"seeds": 0, "progress": False}
    return (
        pd.concat(tp.head_labels(model, seed=seed, **options) for seed in range(3))
        .groupby(HEAD)["induction"]
        .mean()
        .reset_index()
    )


def bootstrap(values: np.ndarray, has: np.ndarray) -> float:
    """The standard error of the area, by drawing heads with and without the label again."""
    generator, groups = np.random.default_rng(0), [np.flatnonzero(has == label) for label in (True, False)]
    drawn = [np.concatenate([generator.choice(group, len(group)) for group in groups]) for _ in range(DRAWS)]
    return float(np.std([area(values[chosen], has[chosen]) for chosen in drawn]))
