"""A table with one row for each model, which a script fills row by row: it can be stopped, and goes on where it was."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from tl_posdisent.utils.files import whole_file


def finished(path: Path, key: Sequence[str]) -> pd.DataFrame:
    """All models that were measured, one row each; the columns ``key`` name a model."""
    return pd.read_csv(path) if path.exists() else pd.DataFrame(columns=list(key))


def fill(
    path: Path,
    key: Sequence[str],
    models: Iterable[tuple[Any, ...]],
    row_of: Callable[[Any], dict[str, Any]],
    minutes: float = math.inf,
) -> None:
    """Measure the models that have no row, in one thread, and add and print theirs, until the time is up."""
    torch.set_num_threads(1)
    start = time.monotonic()
    for model in models:
        if (finished(path, key)[list(key)] == list(model)).all(axis=1).any():
            continue
        if time.monotonic() - start > 60 * minutes:
            break
        row = row_of(model)
        table = pd.concat([finished(path, key), pd.DataFrame([row])]).sort_values(list(key), ignore_index=True)
        with whole_file(path) as file:
            file.write(table.round(4).to_csv(index=False).encode("utf-8"))
        print({name: x for name, x in row.items() if name in key or name.startswith("accuracy")}, flush=True)
