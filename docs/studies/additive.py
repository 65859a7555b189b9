"""How additive are the scores of each text, and beside which baselines?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from shared.rows import Row, row
from shared.texts import Source, parts

import tl_posdisent as tp

TEXTS, LENGTH = 8, 256


def by_text(table: pd.DataFrame, column: str) -> torch.Tensor:
    """``[text]``: the mean of a column over heads."""
    return torch.tensor(table.groupby("batch")[column].mean().to_numpy())


def rows(model: Any, source: Source) -> Iterator[Row]:
    """r of each text's own scores, of random projections, and of one copy with random weights of each kind."""
    texts = parts(model, source, TEXTS, LENGTH)
    beside = tp.additivity(model, texts, controls=["random queries and keys"], progress=False)
    tables = {name.replace("own", "trained"): table for name, table in beside.groupby("scores", sort=False)}
    for kind in ("random", "shuffled"):
        copy = next(tp.random_control(model, [0], weights=kind))  # type: ignore[arg-type]
        tables[kind] = tp.additivity(copy, texts, progress=False)
    for column in ("r_held_out", "r", "r_no_distance"):
        for name, table in tables.items():
            yield row(f"{column}, {name}", by_text(table, column), LENGTH, f'additivity(model, texts)["{column}"]')
    layers = {name: table.groupby("layer")["r_held_out"].mean() for name, table in tables.items()}
    above = sum((layers["trained"] > layers[name]).to_numpy() for name in ("random", "shuffled")) == 2
    over = f"{len(above)} layers"
    yield Row("share of layers above both copies", above.mean(), torch.nan, over, LENGTH, "r_held_out")
