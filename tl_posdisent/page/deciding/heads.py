"""The description of each head: what it needs, what its scores look like, and why these may differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from tl_posdisent.experiments.needs.head_looks import first_token_share, frequent_distances, profile_without_first
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
        attention: table of ``mean_attention`` by ``intervention``.

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
    unmodified = attention[attention["intervention"] == UNMODIFIED]
    shares_of_first = {pair: first_token_share(rows) for pair, rows in _by_head(unmodified)}
    profiles = {pair: frequent_distances(rows) for pair, rows in _by_head(profile_without_first(unmodified))}
    sentences = {}
    for pair in {**answers, **shares}:
        answer, looks, chance = answers.get(pair), shares.get(pair), random.get(pair[0])
        said = [] if answer is None else needs_sentences(answer)
        if looks is not None:
            label = labels_by_head[pair]["label"] if pair in labels_by_head else None
            first = shares_of_first.get(pair)
            said += looks_sentences(looks, chance, label=label, profile=profiles.get(pair), first_token=first)
            said += [x for x in [answer and disagreement_sentence(answer, looks, chance)] if x]
        sentences[pair] = said
    return sentences


def rows_by_head(table: pd.DataFrame) -> dict[Pair, Row]:
    """Return the rows of a table with one row per layer and head."""
    return {(int(row["layer"]), int(row["head"])): row for row in table.to_dict("records")}


def _by_head(attention: pd.DataFrame) -> Iterator[tuple[Pair, pd.DataFrame]]:
    """Yield the rows of each layer and head."""
    groups: Any = attention.groupby(HEAD)
    for (layer, head), rows in groups:
        yield (int(layer), int(head)), rows
