"""A training of a few steps, for tests and the processes that they start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tl_posdisent.synthetic import SyntheticConfig, SyntheticModel, TrainConfig, TriggerCount, train

TASK = TriggerCount(d_vocab=8, n_triggers=1, max_count=3, min_length=6, max_length=6, n_ctx=6)
STEPS = 24
HOW = TrainConfig(epochs=STEPS, batch_size=16, n_train=16, n_test=8, pieces=1)  # each epoch is a step
SHAPE: dict[str, Any] = {"n_layers": 2, "d_model": 96, "n_heads": 2, "d_mlp": 192, "dropout": 0.1}
SHAPE |= {"d_vocab": TASK.d_vocab, "n_ctx": TASK.n_ctx, "n_out": TASK.n_out, "pad_id": TASK.pad_id}


def fresh() -> SyntheticModel:
    return SyntheticModel(SyntheticConfig(**SHAPE), seed=3)


def train_in(folder: Path) -> None:
    train(fresh(), TASK, HOW, folder=folder, progress=False)
