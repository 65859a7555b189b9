"""Disentanglement and positional gradients of every head at each checkpoint of a training run."""

from __future__ import annotations

import pandas as pd
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.experiments.attention_scores.controlled_distance import disentanglement
from tl_posdisent.synthetic.analysis.positional_gradients import positional_gradients
from tl_posdisent.synthetic.tasks.task import long_texts
from tl_posdisent.synthetic.training.train import TrainRun
from tl_posdisent.utils.errors import ArgumentError


def dynamics(
    run: TrainRun,
    *,
    tokens: Int[Tensor, "batch pos"] | None = None,
    texts: int = 16,
    batches: int = 8,
    batch_size: int = 128,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure disentanglement and positional gradients of every head at every checkpoint of a training run.

    Args:
        run: a run with checkpoints (``TrainConfig(checkpoints=...)`` and ``train(..., folder=...)``).
        tokens: texts for ``disentanglement``, ``[batch, pos]`` without padding. Default: long texts of the task.
        texts: number of these texts, if ``tokens`` is not given.
        batches, batch_size: for the gradients, as in ``positional_gradients``.
        seed: seed of the texts and of the batches, the same for all checkpoints.

    Returns:
        One row per checkpoint, layer and head: ``step`` and the columns of ``disentanglement`` and
        ``positional_gradients``. Pass the table to ``gradient_margins`` for the head with the largest gradient.

    Raises:
        ValueError: a run without checkpoints, or with missing or damaged files.

    Example:
        >>> import tempfile
        >>> from dataclasses import replace
        >>> from tl_posdisent.synthetic import dynamics, preset, train
        >>> small = preset("small")
        >>> model, task = small.model("rope", "distance"), small.tasks["distance"]
        >>> how = replace(small.training, n_train=256, n_test=100, checkpoints=(0, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = train(model, task, how, folder=folder, progress=False)
        ...     table = dynamics(run, batches=2, batch_size=8, progress=False)
        >>> table.groupby("step").size().to_dict()  # 3 layers of 4 heads
        {0: 12, 2: 12}
    """
    if not isinstance(run, TrainRun):
        raise ArgumentError("run", f"must be a TrainRun, got {type(run).__name__}")
    if not run.checkpoints:
        raise ArgumentError(
            "run", "must have checkpoints: train with TrainConfig(checkpoints=...) and a folder, got none"
        )
    tokens = long_texts(run.task, texts, seed) if tokens is None else tokens
    tables = []
    for step in tqdm(sorted(run.checkpoints), desc="checkpoints", disable=not progress):
        model = run.at(step)
        table = disentanglement(model, tokens, progress=False)
        gradients = positional_gradients(
            model, run.task, batches=batches, batch_size=batch_size, seed=seed, progress=False
        )
        table = table.merge(gradients, on=["layer", "head"], validate="one_to_one")
        table.insert(0, "step", step)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)
