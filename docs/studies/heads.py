"""Held-out r of every head, its shares, and r of a random copy. The second parts of speeches: many begin alike, and
then random weights have common profiles too."""

from __future__ import annotations

from typing import Any

import pandas as pd
from shared.speeches import three_parts

import tl_posdisent as tp


def table(model: Any) -> pd.DataFrame:
    """Per head, four texts: r with the distance profile of the other texts, shares, and r of a random copy."""
    tokens = three_parts(model)[10:14]
    columns = ["r_held_out", "r", "share_distance", "share_key"]
    trained, chance = (
        tp.additivity(m, tokens, progress=False).groupby(["layer", "head"])[columns].mean()
        for m in (model, next(tp.random_control(model, [0])))
    )
    return trained.assign(random=chance["r_held_out"]).reset_index()
