"""Random copies of a model, the baseline of every measure: each is drawn and read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import nan
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from tl_posdisent.models.loading.random_init import Scale, random_control
from tl_posdisent.models.reading.model_reading import ModelReading, read_model
from tl_posdisent.utils.tables import HEAD
from tl_posdisent.utils.validation import head_label
from tl_posdisent.utils.words import plural

_MAX_NAMED_HEADS = 20  # heads that a sentence names; the table lists all

Measure = Callable[[ModelReading], pd.DataFrame]


def random_copies(model: Any, seeds: Sequence[int], std: Scale) -> Iterator[tuple[int, ModelReading]]:
    """Yield the seed and the reading of each copy with random weights, one in memory at a time."""
    copies = random_control(model, seeds, std=std) if seeds else iter(())
    for seed in seeds:
        yield seed, read_model(next(copies))


def beside_random(
    reading: ModelReading, measures: Mapping[str, Measure], seeds: Sequence[int], std: Scale, *, progress: bool = False
) -> dict[str, pd.DataFrame]:
    """Measure a model and random copies of it, which all measures share.

    Returns:
        A table for each measure: the rows of the model, and then those of the copies, with the columns ``weights``
        (``"trained"`` or ``"random"``) and ``seed`` (missing for the model).
    """
    tables: dict[str, list[pd.DataFrame]] = {name: [] for name in measures}
    with tqdm(total=1 + len(seeds), desc="models", disable=not progress) as bar:
        for name, measure in measures.items():
            tables[name].append(measure(reading).assign(weights="trained", seed=nan))
        bar.update()
        for seed, copy in random_copies(reading.model, seeds, std):
            for name, measure in measures.items():
                tables[name].append(measure(copy).assign(weights="random", seed=seed))
            bar.update()
            del copy  # free its memory before the next
    return {name: pd.concat(some, ignore_index=True).astype({"seed": "Int64"}) for name, some in tables.items()}


def by_weights(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Separate a table of ``beside_random`` into the rows of the model and those of all copies, None without copies."""
    is_random = table["weights"] == "random"
    return table[~is_random], table[is_random] if is_random.any() else None


def above_random(trained: pd.DataFrame, random: pd.DataFrame, column: str) -> str:
    """Describe which heads are above the highest random head of their layer (means over texts).

    Heads that have no value, or whose layer has none with random weights, are left out.

    Args:
        random: the rows of copies, which the column ``seed`` tells apart.
    """
    means = trained.groupby(HEAD)[column].mean()
    copies = random.groupby(["seed", *HEAD])[column].mean()
    highest = copies.groupby("layer").max().reindex(means.index.get_level_values("layer")).to_numpy()
    known = means.notna().to_numpy() & ~np.isnan(highest)
    means, highest = means[known], highest[known]
    is_above = means.to_numpy() > highest
    above, below = ([head_label(*place) for place in means.index[rows]] for rows in (is_above, ~is_above))
    sentence = f"above the highest random head of their layer: {len(above)} of {plural(len(means), 'head')}"
    fewer, word = (below, ", all but ") if len(below) <= len(above) else (above, ", ")
    named = ", ".join(fewer[:_MAX_NAMED_HEADS]) + (" …" if len(fewer) > _MAX_NAMED_HEADS else "")
    return sentence + (word + named if fewer else "")
