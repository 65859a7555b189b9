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
    """Correlations, median errors, and the share of heads in the same half; correlations of the first third of layers
    alone; the median ratio of estimated to measured contribution."""
    early = (one["layer"] <= one["layer"].max() // 3).to_numpy()
    row: dict[str, Any] = {"heads": len(one)}
    for name in ("where", "what"):
        a, b = (x[f"{name}_unclipped"].clip(-1).to_numpy() for x in (one, other))
        row |= {f"r_{name}": np.corrcoef(a, b)[0, 1], f"r_{name}_early": np.corrcoef(a[early], b[early])[0, 1]}
        row |= {f"error_{name}": np.median(abs(a - b)), f"same_half_{name}": ((a > 0.5) == (b > 0.5)).mean()}
    return row | {"level": np.median(one["contribution"].to_numpy() / other["contribution"].to_numpy())}
