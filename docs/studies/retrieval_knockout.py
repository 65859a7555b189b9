"""What do needles lose without the heads that retrieve them?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from shared.retrieval import COUNT, LENGTHS, PAIRS

import tl_posdisent as tp
from tl_posdisent.experiments import needle_texts

GEMMA = {"lengths": (256,), "pairs": 8}  # it takes twice as long


def table(model: Any, lengths: Sequence[int] = LENGTHS, count: int = COUNT, pairs: int = PAIRS) -> pd.DataFrame:
    """What the model loses without the first heads by each score; longer texts without the first by copying."""
    runs: list[tuple[Any, int, int]] = [("copying", n, pairs // (1 + m)) for m, n in enumerate(lengths)]
    needles, tables = needle_texts(model, length=lengths[0], pairs=pairs, seed=0), list[pd.DataFrame]()
    for by, length, size in [*runs, ("attention", lengths[0], pairs)]:
        heldout = needle_texts(model, length=length, pairs=size, seed=1)
        result = tp.retrieval_heads(model, needles, heldout, by=by, count=count, progress=False)
        tables.append(result.knockout.assign(by=by, length=length, n=count, pairs=size))
    return pd.concat(tables, ignore_index=True)
