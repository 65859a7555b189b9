"""Validation of the tables that plots draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

_HEAD = ("layer", "head")


def check_table(table: Any, columns: Sequence[str], numbers: Sequence[str], makers: str) -> pd.DataFrame:
    """Return the table, or raise unless it has rows, these columns and numbers; the error names its makers."""
    needed = [*columns, *numbers]
    if not isinstance(table, pd.DataFrame):
        raise ValueError(f"table must be a pandas table as made by {makers}, got {type(table).__name__}")
    missing = [name for name in needed if name not in table.columns]
    if missing:
        raise ValueError(
            f"table must have the columns {', '.join(needed)}, as made by {makers}, "
            f"got one without {', '.join(missing)}"
        )
    if table.empty:
        raise ValueError(f"table must have rows, as made by {makers}, got none")
    for name in numbers:
        if not is_numeric_dtype(table[name]) or is_bool_dtype(table[name]):
            raise ValueError(f"column {name} must be numbers, got {table[name].dtype}")
    return table


def head_index(table: Any) -> list[str]:
    """Columns that identify a head or a layer: ``layer`` and ``head``, or the one of them that exists."""
    return [name for name in _HEAD if name in getattr(table, "columns", ())]


def mean_over_texts(table: pd.DataFrame, index: Sequence[str], values: Sequence[str]) -> pd.DataFrame:
    """One row for each ``index``, in ascending order: the mean over texts, where the table has a row for each.

    Rows that differ in anything else are not to be averaged, and refused.
    """
    names = list(index)
    if names and bool(table[names].isna().any(axis=None)):
        raise ValueError(f"table must name {' and '.join(names)} in every row: select rows first")
    texts = [*names, *(["batch"] if "batch" in table.columns else [])]
    if len(table) > 1 and (not texts or bool(table.duplicated(texts).any())):
        each = ", ".join(texts) or "figure"
        raise ValueError(f"table must have one row for each {each}, got several: select rows first")
    if not names:
        return table[list(values)].mean().to_frame().T
    return table.groupby(names)[list(values)].mean().reset_index()
