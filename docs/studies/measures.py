"""Verdicts of 24 heads from the loss and from divergences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from shared.speeches import beginnings

import tl_posdisent as tp

DRAWN = ((1, 0), (2, 3), (4, 2), (5, 4), (5, 6), (8, 0), (8, 1), (8, 5), (12, 5), (14, 4), (14, 8), (16, 2))
LADDER = ["first_token", "distance", "distance+sink", "static", "additive"]


def table(model: Any, heads: Sequence[tuple[int, int]] = DRAWN) -> pd.DataFrame:
    """Verdicts of 24 heads from the loss and from divergences, by what is negligible, on two disjoint sets of texts:
    causal rungs fitted to two texts, measured on three others."""
    tables, options = [], {"heads": list(heads), "rungs": LADDER[:1] + LADDER[2:4], "controls": [], "progress": False}
    for name, half in {"a": beginnings(model, 10)[::2], "b": beginnings(model, 10)[1::2]}.items():
        ladder = tp.attention_ladder(model, half[3:], heldout=half[:3], **options)
        cases: list[dict[str, Any]] = [{"measure": "loss"}]
        cases += [{"measure": "kl", "negligible": least} for least in (0.0001, 0.0003, 0.001, 0.003, 0.01)]
        for case in cases:
            verdicts, estimates = (tp.head_verdicts(ladder, confidence=x, **case) for x in (0.95, 0))
            tables.append(verdicts.assign(texts=name, estimate=estimates["verdict"], **{"negligible": None} | case))
    return pd.concat(tables).astype({"negligible": float})
