"""What a head's scores and its attention look like, beside random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Final

import pandas as pd

from tl_posdisent.experiments.attention_scores.additivity import additivity
from tl_posdisent.experiments.attention_scores.attention_by_distance import mean_attention
from tl_posdisent.experiments.attention_scores.head_labels import (
    N_SEQUENCES,
    label_measures,
    labelled,
    repeated_tokens,
)
from tl_posdisent.experiments.measuring.random_copies import beside_random, by_weights
from tl_posdisent.experiments.where_what.sentences import looks_sentences
from tl_posdisent.hooks.hook_list import Chosen
from tl_posdisent.models.reading.model_reading import ModelReading
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
    ((spec, (head,)),) = chosen
    copied = repeated_tokens(reading.model, None, N_SEQUENCES, seed)
    measures = {
        "scores": partial(additivity, tokens=texts, layers=[spec.layer], progress=False),
        "labels": partial(label_measures, texts=texts, copied=copied, pairs=[(spec.layer, head)]),
    }
    tables = beside_random(reading, measures, seeds, "config")
    trained, copies = by_weights(tables["scores"])
    shares = _shares(trained[trained["head"] == head])
    random = None if copies is None else _shares(copies)
    (label,) = labelled(*by_weights(tables["labels"]))["label"]
    attention = mean_attention(reading, texts, chosen, [], whole=False)
    first_token = first_token_share(attention)
    profile = profile_without_first(attention)[["distance", "attention", "cells"]].reset_index(drop=True)
    return HeadLooks(shares, random, str(label), nan if first_token is None else first_token, profile)


def _shares(table: pd.DataFrame) -> dict[str, float]:
    return {name: float(table[name].mean()) for name in _MEASURES if name in table}


def profile_without_first(attention: pd.DataFrame) -> pd.DataFrame:
    """Return mean attention by distance over all pairs but those with the first token of a text as key.

    Args:
        attention: table of ``mean_attention``.

    Returns:
        ``layer``, ``head``, ``distance``, ``attention`` and ``cells``, the number of pairs; without distances that only
        the first token has.
    """
    rows = attention[attention["cells"] > attention["first_cells"]]
    cells = rows["cells"] - rows["first_cells"]
    sums = (rows["attention"] * rows["cells"] - rows["first_attention"]).clip(lower=0)  # not −0 where it has it all
    return rows[["layer", "head", "distance"]].assign(attention=sums / cells, cells=cells)


def first_token_share(attention: pd.DataFrame) -> float | None:
    """Return a head's mean attention to the first token, over queries that see others; None without any.

    Args:
        attention: rows of one head of ``mean_attention``.
    """
    own = attention[attention["distance"] == 0]
    n_queries, rows = int(own["cells"].sum()), attention
    if (attention["distance"] >= 0).all():  # causal: the first query sees itself alone
        n_queries, rows = n_queries - int(own["first_cells"].sum()), attention[attention["distance"] > 0]
    return float(rows["first_attention"].sum()) / n_queries if n_queries else None
