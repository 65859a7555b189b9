"""Texts that are run and differentiated together, as few as a metric allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.experiments.measuring.metrics import LogitDifference, Metric, is_separable
from tl_posdisent.models.running.texts import Texts, Tokens, read_texts

RUN_TOKENS = 512
"""Texts of which several have no more tokens than this are run together."""


def differentiable_texts(
    model: Any, tokens: Tokens, attention_mask: Tensor | None, metric: Metric
) -> tuple[Texts, list[Part]]:
    """Read texts outside of ``torch.inference_mode``, whose tensors cannot be in a graph, and separate them."""
    with torch.inference_mode(False):
        texts = read_texts(model, tokens.clone() if isinstance(tokens, Tensor) else tokens, attention_mask)
        return texts, parts_of(texts, metric)


@dataclass(frozen=True, eq=False)
class Part:
    """Texts that are run together, their metric, and their places in the batch."""

    texts: Texts
    metric: Metric
    places: Tensor


def parts_of(texts: Texts, metric: Metric, *, tokens: int = 1) -> list[Part]:
    """Separate the texts, if the metric of each can be computed alone; otherwise keep all of them together.

    Short texts of equal length may share a part of at most so many ``tokens``, whose passes take little longer than
    those of one of them.
    """
    places = torch.arange(len(texts.tokens))
    if not is_separable(metric):
        return [Part(texts, metric, places)]
    if isinstance(metric, LogitDifference):
        metric.check_batch(len(texts.tokens))
    by_length: dict[int, list[int]] = {}
    for row, length in enumerate(texts.lengths):
        by_length.setdefault(length, []).append(row)
    parts = []
    for length, rows in by_length.items():
        n_texts = max(1, tokens // length)
        for first in range(0, len(rows), n_texts):
            part = rows[first : first + n_texts]
            part_metric = metric.of_rows(part) if isinstance(metric, LogitDifference) else metric
            parts.append(Part(_equally_long(texts, part), part_metric, places[part]))
    return parts


def _equally_long(texts: Texts, rows: Sequence[int]) -> Texts:
    """Return some texts of one length without padding."""
    ids = torch.stack([texts.tokens[row][texts.real[row]] for row in rows])
    return Texts.of(ids, torch.ones_like(ids, dtype=torch.bool))
