"""How near are estimates of the where–what plane to runs of the heads?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from shared.texts import demo_texts, parts
from torch import Tensor

import tl_posdisent as tp

SIZES = ((8, 96, 40), (8, 256, 20), (4, 1024, 8))
"""Numbers of texts, their length, and the number of heads that are run."""
GEMMA = {"sizes": ((6, 96, 20),)}


def table(model: Any, sizes: Sequence[tuple[int, int, int]] = SIZES) -> pd.DataFrame:
    """One row per length of texts: estimates of heads at equal steps of contribution against runs of these heads. For
    the demo model, the first size."""
    rows = []
    for n, length, heads in sizes if model.cfg.d_vocab > 10_000 else sizes[:1]:
        texts = parts(model, "speeches", n, length) if model.cfg.d_vocab > 10_000 else demo_texts(n, length)
        rows.append({"number": n, "length": length} | compared(*measured(model, texts, heads)))
        print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def measured(model: Any, texts: Tensor, heads: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Estimates and runs of the same heads, from the largest contribution down to the last tenth."""
    every = tp.where_or_what(model, texts, exact=0, progress=False)
    order = every["contribution"].to_numpy().argsort()[::-1]
    some = every.loc[np.unique(order[np.linspace(0, 0.9 * (len(order) - 1), heads).astype(int)])]
    pairs = list(zip(some["layer"], some["head"], strict=True))
    return some, tp.where_or_what(model, texts, heads=pairs, exact="all", progress=False)


def compared(one: pd.DataFrame, other: pd.DataFrame) -> dict[str, Any]:
    """Correlations and median errors of the parts, also in the first third of layers alone; the median ratio of
    estimated to measured contribution, with its quartiles."""
    early = (one["layer"] <= one["layer"].max() // 3).to_numpy()
    row: dict[str, Any] = {"heads": len(one)}
    for name in ("where_part", "what_part", "neither_part"):
        a, b = (x[name].to_numpy() for x in (one, other))
        row |= {f"r of {name}": np.corrcoef(a, b)[0, 1], f"r of {name}, early": np.corrcoef(a[early], b[early])[0, 1]}
        row |= {f"error of {name}": np.median(abs(a - b))}
    ratios = one["contribution"].to_numpy() / other["contribution"].to_numpy()
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return row | {"level": middle, "level, lower quartile": low, "level, upper quartile": high}
