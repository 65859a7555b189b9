"""How many heads of the where–what plane are decided, by the number of texts?"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from shared.texts import demo_texts, parts

from tl_posdisent.experiments.causal.estimated_effects import separate_layers
from tl_posdisent.experiments.needs.replacements import CONSTANTS, folds
from tl_posdisent.experiments.needs.shares import NEGLIGIBLE, shares, verdicts
from tl_posdisent.experiments.needs.where_or_what import _estimated
from tl_posdisent.hooks.hook_list import any_heads
from tl_posdisent.models.running.forward_pass import running

NUMBERS = (4, 6, 12, 24, 48)


def table(model: Any, length: int = 48) -> pd.DataFrame:
    """One row per number of texts: how many heads have each verdict, estimated, of the first texts of 48; means and
    profiles are fitted to halves of all of them."""
    small, most = model.cfg.d_vocab < 10_000, max(NUMBERS)
    tokens = demo_texts(most, length) if small else parts(model, "speeches", most, length)
    chosen = any_heads(model, None, None)
    texts, of_folds = folds(model, tokens, None, chosen)
    changes = [separate_layers(fold.replacements, chosen) for fold in of_folds]
    with running(model):
        divergences, n_predictions = _estimated(model, texts, of_folds, changes, 4, 0, progress=False)
    order = torch.randperm(most, generator=torch.Generator().manual_seed(0))
    rows = []
    for n in NUMBERS:
        contribution, distance, uniform, *content = divergences[:, order[:n]]
        weights = n_predictions[order[:n]]
        heads = shares(contribution, distance, uniform, torch.stack(content), weights, CONSTANTS)
        found = pd.Series(verdicts(heads, weights, NEGLIGIBLE)).value_counts()
        of_verdicts = ("where", "what", "both", "either", "neither", "not used", "undecided")
        rows.append({"texts": n, "length": length, "heads": len(heads)} | {x: found.get(x, 0) for x in of_verdicts})
    return pd.DataFrame(rows)
