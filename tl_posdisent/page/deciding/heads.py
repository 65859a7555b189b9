"""The description of each head: what it needs, what its scores look like, and why these may differ."""

from __future__ import annotations

from typing import Any

import pandas as pd

from tl_posdisent.experiments.needs.head_looks import frequent_distances
from tl_posdisent.experiments.needs.sentences import (
    Row,
    disagreement_sentence,
    looks_sentences,
    needs_sentences,
)
from tl_posdisent.hooks.named_hooks import UNMODIFIED
from tl_posdisent.page.measuring.measurement import HEAD, Measurement, by_head

Pair = tuple[int, int]


def describe_heads(
    needs: pd.DataFrame | None,
    additivity: Measurement | None,
    labels: pd.DataFrame | None,
    attention: pd.DataFrame,
) -> dict[Pair, list[str]]:
    """Describe each head, as far as it was measured.

    Args:
        needs: table of ``where_or_what``.
        additivity: the section; a head is compared with the mean of the random heads of its layer.
        labels: table of ``head_labels``.
        attention: table of ``attention_by_distance``.

    Returns:
        Sentences by layer and head.
    """
    answers = {} if needs is None else rows_by_head(needs)
    measured = additivity is not None and additivity.refused is None
    shares = rows_by_head(by_head(additivity.trained)) if additivity is not None and measured else {}
    random: dict[int, Row] = {}
    if additivity is not None and measured and additivity.random is not None:
        means = by_head(additivity.random).groupby("layer", as_index=False).mean()
        random = {int(row["layer"]): row for row in means.to_dict("records")}
    labels_by_head = {} if labels is None else rows_by_head(labels)
    profiles = _profiles(attention)
    sentences = {}
    for pair in {**answers, **shares}:
        answer, looks, chance = answers.get(pair), shares.get(pair), random.get(pair[0])
        said = [] if answer is None else needs_sentences(answer)
        if looks is not None:
            label = labels_by_head[pair]["label"] if pair in labels_by_head else None
            said += looks_sentences(looks, chance, label=label, profile=profiles.get(pair))
            said += [x for x in [answer and disagreement_sentence(answer, looks, chance)] if x]
        sentences[pair] = said
    return sentences


def rows_by_head(table: pd.DataFrame) -> dict[Pair, Row]:
    """Return the rows of a table with one row per layer and head."""
    return {(int(row["layer"]), int(row["head"])): row for row in table.to_dict("records")}


def _profiles(attention: pd.DataFrame) -> dict[Pair, dict[int, float]]:
    """Return each head's mean attention by distance in the unmodified model."""
    own = attention[attention["intervention"] == UNMODIFIED]
    groups: Any = dict([*own.groupby(HEAD)])
    return {(int(layer), int(head)): frequent_distances(rows) for (layer, head), rows in groups.items()}
