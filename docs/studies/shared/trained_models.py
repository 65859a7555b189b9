"""Small models that learn the distance of two triggers, in training: one position encoding each."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import pandas as pd
from torch import Tensor

from tl_posdisent.synthetic import Preset, SyntheticModel, Task, positional_gradients, preset, train

SMALL = preset("small")
TASK = SMALL.tasks["distance"]
NAMES = {"rope": "RoPE", "alibi": "ALiBi", "none": "no positions", "t5": "T5", "learned": "absolute"}
STEPS = (0, 50, 100, 300)
SEEDS, TRAINED = range(5), {"rope": range(4), "alibi": range(3), "none": range(3), "t5": range(2), "learned": range(2)}
BATCHES: dict[str, Any] = {"batches": 32, "batch_size": 64, "progress": False}


def long_texts(task: Task, n: int) -> Tensor:
    """``[n, pos]``: texts without padding, the longest of many, cut to the shortest of them."""
    tokens, _ = task.batch(64 * n, 0)
    lengths = (tokens != task.pad_id).sum(-1)
    longest = lengths.argsort(descending=True, stable=True)[:n]
    return tokens[longest, : int(lengths[longest].min())]


def models_in_training(
    sizes: Preset, encoding: str, task: str, seed: int, steps: Sequence[int]
) -> tuple[dict[int, SyntheticModel], float]:
    """Train a model; return copies of it after these steps, and its accuracy on new texts after the last one."""
    model = sizes.model(encoding, task, seed)
    models = {0: copy.deepcopy(model)}

    def keep(step: int, model: SyntheticModel) -> None:
        if step in steps:
            models[step] = copy.deepcopy(model).eval()

    run = train(model, sizes.tasks[task], on_step=keep, progress=False)
    return models | {run.steps: run.model}, run.test_accuracy


@cache
def trained(encoding: str, seed: int) -> tuple[dict[int, SyntheticModel], float]:
    return models_in_training(SMALL, encoding, "distance", seed, STEPS)


@cache
def gradients(encoding: str, seed: int, step: int) -> pd.DataFrame:
    return positional_gradients(trained(encoding, seed)[0][step], TASK, **BATCHES | {"batches": 16})
