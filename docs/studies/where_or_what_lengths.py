"""Are the where–what plane and its verdicts the same in longer texts?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import pandas as pd
from shared.texts import demo_texts, parts
from where_or_what_texts import compared

import tl_posdisent as tp

LENGTHS = (48, 96, 192)


def table(model: Any, texts: int = 12, lengths: Sequence[int] = LENGTHS) -> pd.DataFrame:
    """One row per length of the first parts of texts, all heads estimated: their verdicts, and the comparison with the
    next length as in ``where_or_what_texts``."""
    small = model.cfg.d_vocab < 10_000
    longest = demo_texts(texts, max(lengths)) if small else parts(model, "speeches", texts, max(lengths))
    tables = {n: tp.where_or_what(model, longest[:, :n], exact=0, progress=False) for n in lengths}
    rows = []
    for one, other in zip_longest(lengths, lengths[1:]):
        counts = tables[one]["verdict"].value_counts().to_dict()
        with_next = compared(tables[one], tables[other]) if other else {}
        rows.append({"length": one, "beside": other, "texts": texts} | counts | with_next)
        print(rows[-1], flush=True)
    return pd.DataFrame(rows)
