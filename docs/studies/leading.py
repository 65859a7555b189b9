"""Does the head with the largest gradient in training have the largest drop at the end?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from shared.rows import Row, row
from shared.trained_models import STEPS, TASK, TRAINED, gradients, trained

from tl_posdisent.synthetic import head_drops


def synthetic_rows() -> Iterator[Row]:
    """Whether the head with the largest gradient in training has the largest drop at the end."""
    models = [trained("rope", seed)[0][STEPS[-1]] for seed in TRAINED["rope"]]
    tokens, labels = TASK.batch(1000, seed=99)
    drops = [head_drops(model, tokens, labels, mode="zero", progress=False) for model in models]
    last = [table.loc[table["effect"].idxmin(), ["layer", "head"]].tolist() for table in drops]
    for step in STEPS:
        tables = [gradients("rope", seed, step) for seed in TRAINED["rope"]]
        first = [table.loc[table["norm_of_mean"].idxmax(), ["layer", "head"]].tolist() for table in tables]
        same = torch.tensor([float(a == b) for a, b in zip(first, last, strict=True)])
        yield row(f"largest gradient and largest drop in one head, step {step}", same, 0, "head_drops(...)", "seeds")
