"""Which heads retrieve needles? Both scores of each head."""

from __future__ import annotations

from typing import Any

import pandas as pd
from shared.retrieval import LENGTH, PAIRS, scored


def table(model: Any, length: int = LENGTH, pairs: int = PAIRS) -> pd.DataFrame:
    """Per head: both scores."""
    return scored(model, length, pairs).heads
