"""The random-weights baseline that commands print beside a trained model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .screen import line


def with_random_baseline(measure: Callable[[Any], Any], model: Any, control: int, seed: int) -> tuple[Any, Any]:
    """Measure a model and ``control`` random initialisations of it: two tables, with a column ``weights`` that is
    ``trained``, or ``random`` and the seed."""
    import pandas as pd

    from tl_posdisent.models.loading.random_init import random_control

    trained = measure(model).assign(weights="trained")
    if not control:
        return trained, trained.iloc[:0]
    seeds = range(seed, seed + control)
    fresh = [measure(m).assign(weights=f"random {s}") for s, m in zip(seeds, random_control(model, seeds), strict=True)]
    return trained, pd.concat(fresh, ignore_index=True)


def together(trained: Any, chance: Any) -> Any:
    """Put both tables into one."""
    import pandas as pd

    return pd.concat([trained, chance], ignore_index=True) if len(chance) else trained


def mean_line(column: str, trained: Any, chance: Any) -> None:
    """Print a column's mean, lowest and highest value over all heads, and its mean at random initialisation."""
    r, heads = trained[column], len(trained[["layer", "head"]].drop_duplicates())
    at_random = f"; at random initialisation {chance[column].mean():.3f}" if len(chance) else ""
    line(f"mean {column} {r.mean():.3f} ({r.min():.3f}…{r.max():.3f}) over {heads} heads{at_random}")
