"""How additive are scores at controlled distances, trained and of random copies?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from shared.rows import Row, row
from shared.texts import Source, parts

import tl_posdisent as tp

TEXTS, LENGTH = 8, 256
SHARES = ["distance", "query", "key", "query:key", "distance:query:key"]


def by_text(table: pd.DataFrame, column: str) -> torch.Tensor:
    """``[text]``: the mean of a column over heads."""
    return torch.tensor(table.groupby("batch")[column].mean().to_numpy())


def copies(model: Any) -> dict[str, Any]:
    """The model, and a copy with random weights: of the configuration's standard deviation, and of 0.02."""
    random, small = (next(tp.random_control(model, [0], std=std)) for std in ("config", 0.02))
    return {"trained": model, "random": random, "random of 0.02": small}


def rows(model: Any, source: Source) -> Iterator[Row]:
    """r and shares of the variance at controlled distances, trained and of random copies; the lowest layers."""
    texts = parts(model, source, TEXTS, LENGTH)
    for name, one in copies(model).items():
        by_batch = [
            tp.controlled_distance(one, text[None], progress=False).assign(batch=n) for n, text in enumerate(texts)
        ]
        table = pd.concat(by_batch)
        for column in ("r_three_axis", "r_two_axis", *SHARES):
            call = f'controlled_distance(model, text)["{column}"]'
            yield row(f"{column}, {name}", by_text(table, column), LENGTH, call)
        lowest = table.groupby(["layer", "batch"])["r_three_axis"].mean().unstack()
        worst = lowest.loc[lowest.mean(axis=1).idxmin()]
        yield row(f"r_three_axis, lowest layer, {name}", torch.tensor(worst.to_numpy()), LENGTH, f"layer {worst.name}")
        heads = table.groupby(["layer", "head"])["r_three_axis"].mean()
        share, over = float((heads > 0.9).mean()), f"{len(heads)} heads"
        name = f"share of heads with r_three_axis above .9, {name}"
        yield Row(name, share, torch.nan, over, LENGTH, 'controlled_distance(model, text)["r_three_axis"]')
