"""The margin of the head with the largest gradient in each layer, while small models learn."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from shared.rows import Row, row
from shared.trained_models import NAMES, STEPS, TRAINED, gradients

from tl_posdisent.synthetic import gradient_margins


def synthetic_rows() -> Iterator[Row]:
    """The margin of the head with the largest gradient in each layer, while models learn."""
    for encoding in ("rope", "alibi", "none"):
        for step in STEPS:
            tables = [gradient_margins(gradients(encoding, seed, step)) for seed in TRAINED[encoding]]
            name, call = f"{NAMES[encoding]}, step {step}", "gradient_margins(positional_gradients(...))"
            margin = torch.stack([torch.tensor(table["margin"].to_numpy()) for table in tables])
            for layer in range(margin.shape[1]):
                yield row(f"margin in thousandths, layer {layer}, {name}", 1000 * margin[:, layer], 0, call, "seeds")
            falls = (margin[:, :-1] > margin[:, 1:]).all(1).double()
            yield row(f"share of seeds in which margins grow downwards, {name}", falls, 0, call, "seeds")
