"""The positional subspace of hybrids while they learn."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from scipy.linalg import subspace_angles
from shared.rows import Row, row
from shared.trained_models import long_texts, models_in_training

from tl_posdisent.experiments import positional_subspace
from tl_posdisent.synthetic import evaluate, preset

MEDIUM, STEPS, SEEDS = preset("medium"), (50, 250), range(2)


def synthetic_rows() -> Iterator[Row]:
    """The largest principal angle of four directions, and the accuracy, when hybrids are as accurate as absolute
    positions and after."""
    task = MEDIUM.tasks["gap8"]
    texts, samples = long_texts(task, 256), task.batch(1000, seed=99)
    trainings = [models_in_training(MEDIUM, "sinusoidal_rope", "gap8", seed, STEPS)[0] for seed in SEEDS]
    for step in STEPS:
        models = [models[step] for models in trainings]
        accuracy = torch.tensor([evaluate(model, *samples)[1] for model in models])
        yield row(f"accuracy, hybrid, step {step}", accuracy, 0, "evaluate(...)", "seeds")
        bases = [[positional_subspace(model, texts, n, rank=4).basis.numpy() for n in (0, 3)] for model in models]
        largest = torch.tensor([np.rad2deg(subspace_angles(*pair).max()) for pair in bases])
        name, call = f"largest of 4 angles before layer 3, hybrid, step {step}", "positional_subspace(...)"
        yield row(name, largest, 0, call, "seeds")
