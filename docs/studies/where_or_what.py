"""Where, what and neither: the parts of every head's contribution, and of the heads of each verdict together."""

from __future__ import annotations

from typing import Any

import pandas as pd
from shared.texts import demo_texts, parts

import tl_posdisent as tp


def table(model: Any, texts: int = 12, length: int = 96) -> pd.DataFrame:
    """The table of ``where_or_what``; first parts of speeches, or of the demo text for the demo model."""
    tokens = parts(model, "speeches", texts, length) if model.tokenizer else demo_texts(texts, length)
    heads = tp.where_or_what(model, tokens, progress=False)
    print(f"{heads.attrs['passes']:.0f} passes. {heads.attrs['statement']}", flush=True)
    groups = {
        str(verdict): [f"L{x.layer}H{x.head}" for x in rows.itertuples()]
        for verdict, rows in heads.groupby("verdict")
        if verdict != "not used"
    }
    together = tp.where_or_what(model, tokens, groups=groups, progress=False)
    print(together.drop(columns="heads").round(3).T.to_string())
    return heads.round(5)
