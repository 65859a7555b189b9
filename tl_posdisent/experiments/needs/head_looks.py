"""What a head's scores and its attention look like, beside random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd
import torch
from jaxtyping import Int64
from torch import Tensor

from tl_posdisent.experiments.attention_scores.additivity import additivity
from tl_posdisent.experiments.attention_scores.head_labels import head_labels
from tl_posdisent.experiments.needs.sentences import looks_sentences
from tl_posdisent.hooks.hook_list import Chosen
from tl_posdisent.models.loading.random_init import random_control
from tl_posdisent.models.patterns import Pattern, for_each_pattern
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.texts import Texts

_MEASURES: Final = ("share_distance", "share_key", "share_query", "r", "r_held_out")
_PAIRS: Final = 0.5  # of the most pairs of any distance, that a peak of attention must have


@dataclass(frozen=True, eq=False)
class HeadLooks:
    """What a head's scores and its attention look like.

    Attributes:
        shares: ``share_distance``, ``share_key``, ``share_query``, ``r`` and ``r_held_out`` of ``additivity``, means
            over texts.
        random: the same of random weights, means over all heads of the layer and copies; None without copies.
        label: of ``head_labels``; empty for a head that has none of the usual labels.
        first_token: mean attention to the first token, over queries that see others.
        profile: ``distance``, ``attention``, the mean over all pairs at this distance without the first token, and
            ``cells``, their number.
    """

    shares: dict[str, float]
    random: dict[str, float] | None
    label: str
    first_token: float
    profile: pd.DataFrame

    def sentences(self) -> list[str]:
        """Say in words what the head looks like."""
        means = frequent_distances(self.profile)
        return looks_sentences(self.shares, self.random, label=self.label, profile=means, first_token=self.first_token)


def frequent_distances(profile: pd.DataFrame) -> dict[int, float]:
    """Return mean attention by distance, without distances that few pairs have, which cannot be a head's peak."""
    often = profile[profile["cells"] >= _PAIRS * profile["cells"].max()]
    return dict(zip(often["distance"].tolist(), often["attention"].tolist(), strict=True))


def measure_looks(reading: ModelReading, texts: Texts, chosen: Chosen, seeds: Sequence[int], seed: int) -> HeadLooks:
    """Measure what one head looks like.

    Args:
        chosen: the head.
        seeds: of random copies of the model.
        seed: of the random tokens on which labels are measured.
    """
    ((spec, heads),) = chosen
    pairs = [(spec.layer, head) for head in heads]
    shares = _shares(additivity(reading, texts, heads=pairs, progress=False))
    random = None
    if seeds:
        copies = random_control(reading.model, seeds)
        tables = [additivity(copy, texts, layers=[spec.layer], progress=False) for copy in copies]
        random = _shares(pd.concat(tables))
    labels = head_labels(reading, texts, heads=pairs, seeds=seeds, seed=seed, progress=False)
    (label,) = labels["label"]
    (first_token,) = labels["first_token"]
    return HeadLooks(shares, random, str(label), float(first_token), _profile(reading.model, texts, spec, heads[0]))


def _shares(table: pd.DataFrame) -> dict[str, float]:
    return {name: float(table[name].mean()) for name in _MEASURES if name in table}


def _profile(model: Any, texts: Texts, spec: AttentionSpec, head: int) -> pd.DataFrame:
    """Average a head's attention over the pairs of each distance, without the first token of each text."""
    sums, cells = torch.zeros(2, 2 * texts.longest - 1, dtype=torch.float64, device="cpu")

    def add(_: AttentionSpec, pattern: Pattern) -> None:
        columns, visible = _columns(spec, pattern.shape[-1], texts.longest)
        sums.index_add_(0, columns, pattern[:, head].double().sum(0).cpu()[visible])
        cells.index_add_(0, columns, torch.full(columns.shape, float(len(pattern)), dtype=torch.float64, device="cpu"))

    for group in texts.groups:
        for_each_pattern(model, group.tokens, [spec], add)
    seen = cells.nonzero()[:, 0]
    means, distances = sums[seen] / cells[seen], seen - texts.longest + 1
    return pd.DataFrame({"distance": distances, "attention": means, "cells": cells[seen].long()})


def _columns(spec: AttentionSpec, length: int, longest: int) -> tuple[Int64[Tensor, " pair"], Tensor]:
    """Return the column of each pair in the sums, distances from −(longest − 1) on, and which cells are pairs."""
    visible = spec.mask(length).cpu().clone()
    visible[:, 0] = False
    query, key = visible.nonzero().T
    return query - key + longest - 1, visible
