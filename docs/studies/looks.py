"""How many heads does the report say look at *where* or at *what*, and how many of random copies?"""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd

import tl_posdisent as tp
from tl_posdisent.page.deciding.where_or_what import KINDS, looks_at
from tl_posdisent.page.measuring.subject import read_subject


def table(model: Any, copies: int = 5) -> pd.DataFrame:
    """Number of heads of each kind on the demo text, cut as the report does it.

    Of the trained model beside one random copy and beside all, and of each random copy beside the next one.
    """
    subject = read_subject(model, tp.demo_text(), None, None, None)
    measured = partial(tp.additivity, tokens=subject.tokens, progress=False)
    trained = measured(model)
    random = [measured(copy).assign(seed=n) for n, copy in enumerate(tp.random_control(model, range(copies)))]
    cases = [("trained, one copy", trained, random[0]), ("trained, all copies", trained, pd.concat(random))]
    for n, copy in enumerate(random):
        cases.append(("random, next copy", copy.drop(columns="seed"), random[(n + 1) % copies]))
    looks = pd.concat([looks_at(heads, baseline).assign(case=case) for case, heads, baseline in cases])
    counts = looks.groupby("case", sort=False)["looks"].value_counts().unstack(fill_value=0).reindex(columns=KINDS)
    n_texts, length = subject.tokens.shape
    return counts.fillna(0).astype(int).reset_index().assign(copies=copies, texts=n_texts, length=length)
