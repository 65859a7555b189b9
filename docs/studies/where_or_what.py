"""What the contribution of every head needs: distances, content, both, either or neither; the largest heads by runs."""

from __future__ import annotations

from typing import Any

import pandas as pd
from shared.texts import demo_texts, parts

import tl_posdisent as tp


def table(model: Any, texts: int = 12, length: int = 96, exact: int = 4) -> pd.DataFrame:
    """The table of ``where_or_what``; first parts of speeches, or of the demo text for the demo model."""
    tokens = parts(model, "speeches", texts, length) if model.tokenizer else demo_texts(texts, length)
    heads = tp.where_or_what(model, tokens, exact=exact, progress=False)
    print(f"{heads.attrs['passes']:.0f} passes. {heads.attrs['statement']}")
    return heads.round(5)
