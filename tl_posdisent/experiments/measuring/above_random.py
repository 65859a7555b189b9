"""Heads of a trained model above the highest random head of their layer."""

from __future__ import annotations

import pandas as pd

from tl_posdisent.utils.validation import head_label
from tl_posdisent.utils.words import plural

_HEAD = ["layer", "head"]


def above_random(trained: pd.DataFrame, random: pd.DataFrame, column: str) -> str:
    """Describe which heads are above the highest random head of their layer (means over texts)."""
    mean = trained.groupby(_HEAD)[column].mean().dropna()
    copies = random.groupby([*{"weights", "seed"}.intersection(random), *_HEAD])[column].mean()
    limit = copies.groupby("layer").max().reindex(mean.index.get_level_values("layer")).to_numpy()
    above = mean.to_numpy() > limit
    high, low = ([head_label(*place) for place in mean.index[some]] for some in (above, ~above))
    said = f"above the highest random head of their layer: {len(high)} of {plural(len(mean), 'head')}"
    fewer = low if len(low) <= len(high) else high
    named = ", ".join(fewer[:20]) + (" …" if len(fewer) > 20 else "")  # the table lists all
    return said + (f"{', all but' if fewer is low else ','} {named}" if fewer else "")
