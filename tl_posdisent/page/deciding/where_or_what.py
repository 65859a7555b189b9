"""Whether a head's scores depend on *where* a key is or on *what* it is, more than those of random weights."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tl_posdisent.page.deciding.words import MISSING
from tl_posdisent.page.measuring.measurement import HEAD
from tl_posdisent.utils.statistics import significance

DIFFERENCE = "what − where"
"""The share of the variance of a head's scores that the key alone explains, minus that of the distance alone."""
ERROR, OVER_RANDOM = f"{DIFFERENCE}_se", f"{DIFFERENCE} over random"
AS_RANDOM = "like random"
KINDS = ("where", "what", AS_RANDOM, "undecided")
CONFIDENCE = 0.95
"""Confidence of the t-interval over texts that has to exclude 0 and all random heads of the layer."""


def looks_at(trained: pd.DataFrame, random: pd.DataFrame | None) -> pd.DataFrame:
    """Decide for each head of tables of ``additivity`` whether it looks at *where* a key is or at *what* it is.

    A head is *where* (*what*) if its difference what − where lies below (above) 0 and those of all random heads of its
    layer, by the 95 % t-interval of its mean over texts. It is *like random* if it lies so on one side of 0 alone, else
    *undecided*. Random weights lean to one side too (the last layer of the demo model to *where*, SmolLM2-135M to
    *what*), so the sign alone shows nothing learned.

    Args:
        trained: a row for each text, layer and head.
        random: the same with a column ``seed``, for random weights; None for no baseline, which leaves 0 alone.

    Returns:
        One row per layer and head: ``what − where``, its standard error over texts, the difference minus the mean of
        the random heads of the layer (NaN without them), and ``looks``, which is "–" for scores that do not vary.
    """
    heads = _differences(trained, HEAD)
    if random is None:
        low = high = mean = np.full(len(heads), np.nan)
        known = np.ones(len(heads), dtype=bool)
    else:
        by_layer = _differences(random, ["seed", *HEAD]).groupby("layer")[DIFFERENCE].agg(["min", "max", "mean"])
        low, high, mean = by_layer.reindex(heads["layer"]).to_numpy().T
        known = np.isfinite(mean)
    columns = {DIFFERENCE: heads[DIFFERENCE], ERROR: heads["error"], OVER_RANDOM: heads[DIFFERENCE] - mean}
    return heads[HEAD].assign(**columns, looks=_decide(heads, low, high, known))


def _differences(table: pd.DataFrame, index: list[str]) -> pd.DataFrame:
    """Average what − where over texts: its mean, standard error and degrees of freedom."""
    values = table.assign(**{DIFFERENCE: table["share_key"] - table["share_distance"]}).groupby(index)[DIFFERENCE]
    means = values.agg(["mean", "sem", "count"]).reset_index()
    return means.rename(columns={"mean": DIFFERENCE, "sem": "error"}).assign(df=means["count"] - 1)


def _decide(heads: pd.DataFrame, low: np.ndarray, high: np.ndarray, known: np.ndarray) -> pd.Series:
    """Compare each head with 0 and the lowest and highest random head; ``known`` is False where there is none."""
    looks = pd.Series("undecided", heads.index).where(heads[DIFFERENCE].notna(), MISSING)
    for row, (value, error, df) in enumerate(heads[[DIFFERENCE, "error", "df"]].to_numpy()):
        below, above = np.fmin(low[row], 0.0) - value, value - np.fmax(high[row], 0.0)
        for kind, beyond, size in (("where", below, -value), ("what", above, value)):
            if known[row] and _surely_positive(size, error, df):
                looks.iloc[row] = kind if _surely_positive(beyond, error, df) else AS_RANDOM
    return looks


def _surely_positive(value: float, error: float, df: float) -> bool:
    return value > 0 and significance(value, error, df) >= CONFIDENCE
