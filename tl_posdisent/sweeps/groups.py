"""Rows of one model at one checkpoint, whatever the texts."""

from __future__ import annotations

from typing import Any

import pandas as pd

_FRONT = ("model", "checkpoint", "step", "seed")


def by_model(table: pd.DataFrame) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """Pairs of what names the model, and its rows, in the order of the table; one pair if nothing names it."""
    names = [name for name in _FRONT if name in table.columns]
    if not names:
        return [({}, table)]
    found = table.groupby(names, sort=False, dropna=False)
    kept = [name for name in names if name != "seed" or table[name].notna().any()]
    return [({name: rows[name].iloc[0] for name in kept}, rows) for _, rows in found]
