"""Accuracy and loss of a synthetic model without each of its heads."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from tl_posdisent.experiments.causal.head_ablation import head_ablation
from tl_posdisent.models.running.texts import read_texts
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.synthetic.tasks.task import IGNORED
from tl_posdisent.synthetic.training.evaluation import answers, check_samples
from tl_posdisent.utils.tables import with_ends
from tl_posdisent.utils.validation import check_choice


def head_drops(
    model: SyntheticModel,
    tokens: Int[Tensor, "sample pos"],
    labels: Int[Tensor, " sample"],
    *,
    mode: Literal["zero", "mean"] = "zero",
    progress: bool = True,
) -> pd.DataFrame:
    """Measure accuracy and loss of a synthetic model without each of its heads: ``head_ablation`` with labels.

    Args:
        model: a trained model.
        tokens: samples ``[sample, pos]`` that it was not trained on, for instance ``split.test_tokens``.
        labels: labels ``[sample]``; those of -100 are ignored.
        mode: ``"zero"``, as in arXiv 2505.13027, or ``"mean"``: the mean over these samples, without padding unless
            the model reads it.
        progress: show a progress bar.

    Returns:
        One row per head: ``layer``, ``head``, ``baseline`` (accuracy, 0 to 1), ``value`` (without the head),
        ``effect`` (value - baseline, so a drop is negative); ``loss_baseline``, ``loss_value``, ``loss_effect``, the
        same for the mean cross-entropy in nats. ``deposit`` summarises the table. As in ``head_ablation``, rows of
        heads that could not be measured are NaN, and a warning says which and why.

    Raises:
        ValueError: as ``evaluate``; an unknown mode.

    Example:
        >>> from tl_posdisent.synthetic import head_drops, preset
        >>> small = preset("small")
        >>> table = head_drops(small.model("rope", "count"), *small.tasks["count"].batch(100), progress=False)
        >>> len(table), bool(table["baseline"][0] < 0.5)  # 3 layers of 4 heads, untrained
        (12, True)
    """
    check_samples(model, tokens, labels)
    check_choice("mode", mode, ("zero", "mean"))
    pad = model.config.pad_id
    real = None if pad is None else tokens != pad
    reference = read_texts(model, tokens, real) if mode == "mean" else None
    losses: list[float] = []  # the baseline's, then each row's that was measured

    def accuracy(logits: Tensor, tokens: Tensor) -> Tensor:
        logits = answers(logits, tokens, pad).double()
        answer = labels.to(logits.device)
        losses.append(float(cross_entropy(logits, answer)))
        return (logits.argmax(-1) == answer)[answer != IGNORED].double().mean()

    with torch.no_grad():
        table = head_ablation(model, tokens, accuracy, mode=mode, reference=reference, progress=progress)
    loss = np.full(len(table), np.nan)
    loss[table["value"].notna()] = losses[1:]
    table = table.assign(loss_baseline=losses[0], loss_value=loss, loss_effect=loss - losses[0])
    return with_ends(table, (), ["loss_baseline", "baseline", "loss_value", "value", "loss_effect", "effect"])
