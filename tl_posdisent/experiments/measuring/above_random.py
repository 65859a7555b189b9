"""Heads of a trained model above the highest random head of their layer."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tl_posdisent.utils.validation import head_label
from tl_posdisent.utils.words import plural

_HEAD = ["layer", "head"]
_MAX_NAMED_HEADS = 20  # heads that a sentence names; the table lists all


def above_random(trained: pd.DataFrame, random: pd.DataFrame, column: str) -> str:
    """Describe which heads are above the highest random head of their layer (means over texts).

    Heads that have no value, or whose layer has none with random weights, are left out.
    """
    means = trained.groupby(_HEAD)[column].mean()
    copies = random.groupby([*{"weights", "seed"}.intersection(random), *_HEAD])[column].mean()
    highest = copies.groupby("layer").max().reindex(means.index.get_level_values("layer")).to_numpy()
    known = means.notna().to_numpy() & ~np.isnan(highest)
    means, highest = means[known], highest[known]
    is_above = means.to_numpy() > highest
    above, below = ([head_label(*place) for place in means.index[rows]] for rows in (is_above, ~is_above))
    sentence = f"above the highest random head of their layer: {len(above)} of {plural(len(means), 'head')}"
    fewer, word = (below, ", all but ") if len(below) <= len(above) else (above, ", ")
    named = ", ".join(fewer[:_MAX_NAMED_HEADS]) + (" …" if len(fewer) > _MAX_NAMED_HEADS else "")
    return sentence + (word + named if fewer else "")
