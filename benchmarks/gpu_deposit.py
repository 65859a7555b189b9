"""The models of arXiv 2505.13027 at their size, for as many steps as fit the time: accuracy and deposit.

Each model is a row of a table, which is written as soon as it is measured; a model that has a row is not trained again.
The settings are those of ``preset("paper")`` but for smaller batches and a larger learning rate, since there are fewer
steps. Time is split evenly over the models that are left; the schedule has as many steps as should fit, and a training
that is slower than that is stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import deposit_96_heads
import numpy as np
import resumed
from common import device, device_name, seconds
from gpu_tools import Found

from tl_posdisent.synthetic import Preset, SyntheticModel, TrainConfig, evaluate, preset, train

PAPER = preset("paper")
# The paper's RoPE has sinusoidal positions, too.
ENCODINGS = ("sinusoidal_rope", "absolute_mla", "none", "sinusoidal", "alibi")
KEY = ["size", "task", "encoding", "seed", "device"]
TRAINING_SHARE = 0.7  # of a model's time; the rest is for the first steps and for measuring


@dataclass(frozen=True)
class Size:
    """Of models, of batches and of samples; ``most`` is the time of a model at most."""

    preset: Preset
    batch: int = 128
    tested: int = 10_000  # for accuracy
    ablated: int = 512  # for drops
    most: float = float("inf")


class TimeIsUp(Exception):
    """Ends a training."""


def settings(size: Size, steps: int) -> TrainConfig:
    """Of a training of at least so many steps, or a few less than would repeat the published number of samples."""
    epochs = -(-steps * size.batch // size.preset.training.n_train)
    how = replace(size.preset.training, batch_size=size.batch, lr=5e-4, betas=(0.9, 0.98), n_test=1, test_every=None)
    return replace(how, epochs=epochs, n_train=size.batch * (steps // epochs))


def step_time(size: Size, task: str, encoding: str) -> float:
    """Seconds of a step, once everything is loaded."""
    model = size.preset.model(encoding, task).to(device())
    run = partial(train, model, size.preset.tasks[task], settings(size, 4), progress=False)
    run()
    return seconds(run) / 4


def trained(size: Size, task: str, encoding: str, planned: int, deadline: float) -> tuple[SyntheticModel, int, int]:
    """The model, the number of steps, and that of the schedule."""
    model, done = size.preset.model(encoding, task).to(device()), 0
    how = settings(size, planned)

    def stop(step: int, _: Any) -> None:
        nonlocal done
        done = step
        if time.monotonic() > deadline:
            raise TimeIsUp

    try:
        train(model, size.preset.tasks[task], how, on_step=stop, progress=False)
    except TimeIsUp:
        model.eval()
    return model, done, how.steps


def row_of(size: Size, allowed: float, key: tuple[Any, ...]) -> dict[str, Any]:
    """Train one model and measure it."""
    start = time.monotonic()
    _, task, encoding, *_ = key
    planned = max(1, int(TRAINING_SHARE * allowed / step_time(size, task, encoding)))
    model, steps, planned = trained(size, task, encoding, planned, start + 0.85 * allowed)
    took = time.monotonic() - start
    tokens, labels = (x.to(device()) for x in size.preset.tasks[task].batch(size.tested, seed=99))  # of another seed
    loss, accuracy = evaluate(model, tokens, labels)
    row: dict[str, Any] = dict(zip(KEY, key, strict=True))
    row |= {"steps": steps, "planned": planned, "batch": size.batch, "samples": steps * size.batch}
    row |= {"epochs": steps * size.batch / size.preset.train_config(task).n_train, "seconds": took}
    row |= {"tested": size.tested, "ablated": size.ablated, "accuracy": accuracy, "loss": loss}
    return row | deposit_96_heads.drops_of(model, tokens[: size.ablated], labels[: size.ablated])[0]


def checks(path: Path, size: Size, deadline: float) -> Iterator[tuple[str, Callable[[], Found]]]:
    """One for each model: the number of values of its row that are missing or not finite."""
    name = device_name()
    keys = [(size.preset.name, task, encoding, 0, name) for task, encoding in product(size.preset.tasks, ENCODINGS)]

    def of_row(key: tuple[Any, ...]) -> Any:
        known = resumed.finished(path, KEY)
        return known[(known[KEY] == list(key)).all(axis=1)]

    def measured(key: tuple[Any, ...]) -> Found:
        left = sum(of_row(other).empty for other in keys[keys.index(key) :])
        allowed = min(size.most, (deadline - time.monotonic()) / max(1, left))
        resumed.fill(path, KEY, [key], partial(row_of, size, allowed))
        (row,) = of_row(key).to_dict("records")
        values = [row[f"zero_accuracy_{x}"] for x in ("drop", "second")]
        bad = int((~np.isfinite([row["accuracy"], row["loss"], *values])).sum()) + (row["steps"] < 1)
        said = f"accuracy {row['accuracy']:.2f} after {row['steps']:.0f} of {row['planned']:.0f} steps"
        return Found(bad, 0, f"{said}, {row['epochs']:.2g} epochs; drops {values[0]:.2f}, {values[1]:.2f}")

    for key in keys:
        yield f"numbers that are not there: {key[1]}, {key[2]}", partial(measured, key)


def miniature() -> Size:
    """The same tasks and encodings, in two small layers, for a second."""
    shape = dict(PAPER.shape) | {"n_layers": 2, "d_model": 32, "n_heads": 2, "d_mlp": 32}
    latent = dict(PAPER.per_encoding["absolute_mla"])
    latent |= {"d_query_latent": 16, "d_key_latent": 16, "d_head": 16, "d_rope": 8}
    small = replace(PAPER, name="miniature", shape=shape, per_encoding={"absolute_mla": latent})
    return Size(small, batch=8, tested=16, ablated=8, most=0.5)
