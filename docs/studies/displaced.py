"""The positional subspace of hybrids while they learn."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch
from scipy.linalg import subspace_angles
from shared.rows import Row, row
from shared.trained_models import long_texts, models_in_training

from tl_posdisent.experiments import positional_subspace
from tl_posdisent.synthetic import evaluate, preset

MEDIUM = preset("medium")


def synthetic_rows() -> Iterator[Row]:
    """The positional subspace of hybrids while they learn, when they are as accurate as absolute positions and after,
    with subspaces of two to eight directions."""
    task, measured = MEDIUM.tasks["gap8"], []
    texts = long_texts(task, 256)
    for seed in range(2):
        models, _ = models_in_training(MEDIUM, "sinusoidal_rope", "gap8", seed, range(0, 251, 50))
        for step, model in models.items():
            measured.append({"step": step, "accuracy": evaluate(model, *task.batch(1000, seed=99))[1]})
            for rank in (2, 4, 8):
                bases = [positional_subspace(model, texts, layer, rank=rank).basis for layer in (0, 1, 2, 3, 5)]
                turned = [np.rad2deg(subspace_angles(bases[0].numpy(), basis.numpy()).max()) for basis in bases[1:]]
                names = [f"largest of {rank} angles before layer {layer}" for layer in (1, 2, 3, 5)]
                measured[-1] |= dict(zip(names, turned, strict=True))
    for step, part in pd.DataFrame(measured).groupby("step"):
        for column in part.columns.drop("step"):
            values = torch.tensor(part[column].to_numpy())
            yield row(f"{column}, hybrid, step {step}", values, 0, "positional_subspace(...)", "seeds")
