"""Accuracy and loss of a synthetic model without each of its heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from tl_posdisent.experiments.causal.head_ablation import head_ablation
from tl_posdisent.hooks.ablate import AblationMode
from tl_posdisent.models.running.texts import Texts, read_texts
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.synthetic.tasks.task import IGNORED
from tl_posdisent.synthetic.training.evaluation import answers, check_samples
from tl_posdisent.utils.errors import ArgumentError


def head_drops(
    model: SyntheticModel,
    tokens: Int[Tensor, "sample pos"],
    labels: Int[Tensor, " sample"],
    *,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    mode: AblationMode = "zero",
    reference: Int[Tensor, "sample pos"] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure accuracy and loss of a synthetic model without each of its heads: ``head_ablation`` with labels.

    Args:
        model: a trained model.
        tokens: samples ``[sample, pos]`` that it was not trained on, for instance ``split.test_tokens``.
        labels: labels ``[sample]``; those of -100 are ignored.
        layers, heads, mode, seed, progress: as in ``head_ablation``. arXiv 2505.13027 zeroes heads.
        reference: texts for the mean, padded like ``tokens``, which are the default; padding is excluded unless the
            model reads it.

    Returns:
        One row per head: ``layer``, ``head``, ``baseline`` (accuracy, 0 to 1), ``value`` (without the head),
        ``effect`` (value - baseline, so a drop is negative); ``loss_baseline``, ``loss_value``, ``loss_effect``, the
        same for the mean cross-entropy in nats. ``deposit`` summarises the table. As in ``head_ablation``, rows of
        heads that could not be measured are NaN, and a warning says which and why.

    Raises:
        ValueError: as ``evaluate``, and as ``head_ablation``; padded samples with ``mode="resample"``.

    Example:
        >>> from tl_posdisent.synthetic import head_drops, preset
        >>> small = preset("small")
        >>> table = head_drops(small.model("rope", "count"), *small.tasks["count"].batch(100), progress=False)
        >>> len(table), bool(table["baseline"][0] < 0.5)  # 3 layers of 4 heads, untrained
        (12, True)
    """
    check_samples(model, tokens, labels)
    pad = model.config.pad_id
    if mode == "resample" and pad is not None and bool((tokens == pad).any()):
        raise ArgumentError(
            "tokens",
            'must be samples of one length for mode "resample", which replaces one sample by another, got padding, '
            "which this model does not read: use another mode, or pass samples of each length separately",
        )
    averaged: Any = tokens if reference is None and mode == "mean" else reference
    if mode == "mean":
        averaged = reference_texts(model, averaged)
    losses: list[float] = []  # the baseline's, then each row's that was measured

    def accuracy(logits: Tensor, tokens: Tensor) -> Tensor:
        logits = answers(logits, tokens, pad).double()
        answer = labels.to(logits.device)
        losses.append(float(cross_entropy(logits, answer)))
        return (logits.argmax(-1) == answer)[answer != IGNORED].double().mean()

    options: dict[str, Any] = {"layers": layers, "heads": heads, "mode": mode, "reference": averaged, "seed": seed}
    with torch.no_grad():
        table = head_ablation(model, tokens, accuracy, progress=progress, **options)
    loss = np.full(len(table), np.nan)
    loss[table["value"].notna()] = losses[1:]
    return table.assign(loss_baseline=losses[0], loss_value=loss, loss_effect=loss - losses[0])


def reference_texts(model: SyntheticModel, tokens: Any) -> Texts:
    """Return the texts for the mean of heads, without padding if the model does not read it."""
    pad = model.config.pad_id
    return read_texts(model, tokens, None if pad is None else tokens != pad)
