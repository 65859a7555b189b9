"""What does perturbed text cost: exchanged tokens, positions, or rotary features?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from shared.rows import Row, row
from shared.texts import Source, how_many, parts
from torch import Tensor

import tl_posdisent as tp

TEXTS, LENGTH, DRAWS = 3, 256, 6
KINDS = ("order", "index", "feature")
FRACTIONS = (0, 0.05)


def rows(model: Any, source: Source) -> Iterator[Row]:
    """The loss added at intact positions (neither token nor next token moved) and accuracy where tokens are exchanged;
    ratios of the losses that kinds add, over texts."""
    texts, draws = parts(model, source, TEXTS, LENGTH), how_many(model, source, DRAWS)
    reading, call = tp.read_model(model), "perturbation_curve(model, texts)"
    tables = [
        tp.perturbation_curve(reading, text[None], KINDS, FRACTIONS, [seed], progress=False).assign(text=n, draw=seed)
        for seed in range(draws)
        for n, text in enumerate(texts)
    ]
    table = pd.concat(tables).set_index(["kind", "fraction", "draw", "text"]).sort_index()

    def measured(kind: str, fraction: float, column: str) -> Tensor:
        """``[draw, text]``."""
        return torch.tensor(table.loc[(kind, fraction), column].unstack().to_numpy())

    for fraction in FRACTIONS:
        for what in ("added_loss", "accuracy") if fraction else ("accuracy",):
            values = measured("order", fraction, what).mean(1)
            name = f"{what.replace('_', ' ')}, order, {fraction:.0%}"
            yield row(name, values, LENGTH, call, f"draws, {len(texts)} texts")
    for kind in ("order", "feature"):
        value, error = ratio(*(measured(x, 0.05, "added_loss").mean(0) for x in (kind, "index")))
        name = f"added loss, {kind} over index, 5%, error over texts"
        yield Row(name, value, error, f"{len(texts)} texts", LENGTH, call)


def ratio(x: Tensor, y: Tensor) -> tuple[float, float]:
    """The ratio of two means, and its standard error by leaving out one pair of values after another (jackknife)."""
    n = len(x)
    without = (x.sum() - x) / (y.sum() - y)
    return (x.mean() / y.mean()).item(), ((n - 1) / n * (without - without.mean()).square().sum()).sqrt().item()
