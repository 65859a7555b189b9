"""A question about one of two needles, without rotation in some layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from shared.changes import BY_LENGTH, Change, by_layers, globals_of, last_logits, row

from tl_posdisent.experiments import logit_difference, needle_texts

GEMMA = {"pairs": 8}  # it takes twice as long


def table(
    model: Any,
    lengths: Sequence[int] = (256, 512),
    pairs: int = 12,
    draws: int = 2,
    every: int = 4,
    global_layers: Sequence[int] | None = None,
) -> pd.DataFrame:
    """A question about one of two needles: logit of the answer minus that of the other needle's word, how often it is
    positive (a half is chance), and minus the mean of those of words that only other texts have. Standard errors are
    over pairs of texts. Longer texts for some changes."""
    rows, changes = list[dict[str, Any]](), [Change("unchanged", "", torch.nan, [])]
    changes += by_layers(model, every, draws, globals_of(model) if global_layers is None else global_layers)
    for length in lengths:
        needles = needle_texts(model, length=length, pairs=pairs, seed=2)  # those of ``retrieval_rotation``
        absent = [[x for x in needles.words.unique().tolist() if x not in own] for own in needles.words.tolist()]
        from_absent = logit_difference(needles.words[:, 0], absent)
        for change in changes:
            if change.name not in BY_LENGTH and length > min(lengths):
                continue
            logits = torch.cat([last_logits(model, text[None], change.hooks) for text in needles.tokens])
            other = needles.metric(logits)
            measures = {"answer minus other": other, "answer over other": (other > 0).float()}
            measures["answer minus absent"] = from_absent(logits)
            for measure, values in measures.items():
                rows.append(row(change, measure, f"{length} tokens", values.view(-1, 2).mean(1)))
    return pd.DataFrame(rows).rename(columns={"texts": "pairs"})
