"""Texts that are run and differentiated together, as few as a metric allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.experiments.causal.metrics import LogitDifference, Metric, next_token_loss
from tl_posdisent.models.texts import TextGroup, Texts, Tokens, read_texts


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


def parts_of(texts: Texts, metric: Metric) -> list[Part]:
    """Separate the texts, if the metric of each can be computed alone; otherwise keep them together."""
    every = torch.arange(len(texts.tokens), device="cpu")
    if not (metric is next_token_loss or isinstance(metric, LogitDifference)):
        return [Part(texts, metric, every)]
    if isinstance(metric, LogitDifference):
        metric.check_batch(len(texts.tokens))
    parts = []
    for row, ids in enumerate(texts.unpadded()):
        nothing = torch.zeros(1, dtype=torch.int64, device=ids.device)
        alone = Texts(ids[None], torch.ones_like(ids[None], dtype=torch.bool), [TextGroup(nothing, ids[None], nothing)])
        own = metric.of_text(row) if isinstance(metric, LogitDifference) else metric
        parts.append(Part(alone, own, every[row : row + 1]))
    return parts
