"""A table with one row for each model, which a script fills row by row: it can be stopped, and goes on where it was."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from shared.rows import TABLES
from tl_posdisent.utils.files import whole_file


def finished(name: str, key: Sequence[str]) -> pd.DataFrame:
    """All models that were measured, one row each; the columns ``key`` name a model."""
    path = TABLES / f"{name}.csv"
    return pd.read_csv(path) if path.exists() else pd.DataFrame(columns=list(key))


def fill(
    name: str,
    key: Sequence[str],
    models: Iterable[tuple[Any, ...]],
    row_of: Callable[[Any], dict[str, Any]],
    minutes: float = math.inf,
) -> None:
    """Measure the models that have no row, and add and print theirs, until the time is up."""
    path, start = TABLES / f"{name}.csv", time.monotonic()
    for model in models:
        if (finished(name, key)[list(key)] == list(model)).all(axis=1).any():
            continue
        if time.monotonic() - start > 60 * minutes:
            break
        row = row_of(model)
        table = pd.concat([finished(name, key), pd.DataFrame([row])]).sort_values(list(key), ignore_index=True)
        with whole_file(path) as file:
            file.write(table.round(4).to_csv(index=False).encode("utf-8"))
        print({column: x for column, x in row.items() if column in key or column.startswith("accuracy")}, flush=True)
