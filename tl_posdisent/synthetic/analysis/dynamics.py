"""Disentanglement and positional gradients of every head in the course of a training run."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.experiments.attention_scores.controlled_distance import disentanglement
from tl_posdisent.synthetic.analysis.positional_gradients import positional_gradients
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.synthetic.tasks.task import Task, long_texts
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.tables import with_ends
from tl_posdisent.utils.validation import shown


def dynamics(
    models: Mapping[int, SyntheticModel],
    task: Task,
    *,
    tokens: Int[Tensor, "batch pos"] | None = None,
    texts: int = 16,
    batches: int = 8,
    batch_size: int = 128,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure disentanglement and positional gradients of every head of a model after several steps of training.

    Args:
        models: step → the model after so many steps: copies that a function ``on_step`` of ``train`` keeps.
        task: the task that they learn.
        tokens: texts for ``disentanglement``, ``[batch, pos]`` without padding. Default: long texts of the task.
        texts: number of these texts, if ``tokens`` is not given.
        batches, batch_size: for the gradients, as in ``positional_gradients``.
        seed: seed of the texts and of the batches, the same for all steps.

    Returns:
        One row per step, layer and head: ``step`` and the columns of ``disentanglement`` and
        ``positional_gradients``. Pass the table to ``gradient_margins`` for the head with the largest gradient.

    Raises:
        ValueError: no models; another kind of task; as ``positional_gradients``.

    Example:
        >>> import copy
        >>> from tl_posdisent.synthetic import dynamics, preset, train
        >>> small = preset("small")
        >>> model, task = small.model("rope", "distance", n_train=256, n_test=100), small.tasks["distance"]
        >>> models = {0: copy.deepcopy(model)}
        >>> def keep(step, model):
        ...     models[step] = copy.deepcopy(model)
        >>> run = train(model, task, on_step=keep, progress=False)
        >>> table = dynamics(models, task, batches=2, batch_size=8, progress=False)
        >>> table.groupby("step").size().to_dict()  # 3 layers of 4 heads
        {0: 12, 1: 12, 2: 12}
    """
    if not isinstance(models, Mapping) or not models:
        raise ArgumentError("models", f"must be step → SyntheticModel, with at least one, got {shown(models)}")
    if not isinstance(task, Task):
        raise ArgumentError("task", f"must be a Task, got {type(task).__name__}")
    tokens = long_texts(task, texts, seed) if tokens is None else tokens
    tables = []
    for step in tqdm(sorted(models), desc="steps", disable=not progress):
        table = disentanglement(models[step], tokens, progress=False)
        gradients = positional_gradients(
            models[step], task, batches=batches, batch_size=batch_size, seed=seed, progress=False
        )
        table = table.merge(gradients, on=["layer", "head"], validate="one_to_one")
        table.insert(0, "step", step)
        tables.append(table)
    return with_ends(pd.concat(tables, ignore_index=True), (), ["r_three_axis", "r_two_axis", "r", "norm_of_mean"])
