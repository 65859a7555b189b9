"""Heads that retrieve needles, and others of their layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import tl_posdisent as tp
from shared.changes import Head, last_logits
from tl_posdisent.experiments import Needles, needle_texts

LENGTH, LENGTHS, PAIRS = 256, (256, 512), 12
COUNT = 8  # heads that are knocked out, or whose frequencies are removed


@cache
def scored(model: Any, length: int, pairs: int) -> tp.experiments.RetrievalHeads:
    """Both scores, with as few knock-outs as possible; once for all studies."""
    needles, few = (needle_texts(model, length=length, pairs=n, seed=seed) for seed, n in enumerate((pairs, 2)))
    return tp.retrieval_heads(model, needles, few, count=1, draws=1, progress=False)


def random_heads(heads: Sequence[Head], top: Sequence[Head], seed: int) -> list[Head]:
    """As many heads of each layer as it has among the first, drawn from the others."""
    generator, drawn = np.random.default_rng(seed), list[Head]()
    for layer in sorted({layer for layer, _ in top}):
        others = [head for head in heads if head[0] == layer and head not in top]
        n = sum(top_layer == layer for top_layer, _ in top)
        drawn += [others[place] for place in generator.choice(len(others), n, replace=False)]
    return drawn


def last_heads(heads: pd.DataFrame, top: Sequence[Head]) -> list[Head]:
    """As many heads of each layer as it has among the first, those whose scores are closest to 0."""
    counts = pd.Series([layer for layer, _ in top]).value_counts()
    by_size = heads.assign(size=heads["copying"].abs())
    some = [by_size[by_size["layer"] == layer].nsmallest(n, "size") for layer, n in counts.items()]
    return [*pd.concat(some)[["layer", "head"]].itertuples(index=False, name=None)]


def answers(model: Any, needles: Needles, hooks: Any) -> Tensor:
    """``[text]``: the logit of the answer minus that of the other needle's word."""
    logits = torch.cat([last_logits(model, text[None], hooks) for text in needles.tokens])
    return needles.metric(logits).double().cpu()


def difference(model: Any, needles: Needles, hooks: Any) -> tuple[float, float, float]:
    """Answer minus decoy, its standard error over pairs, and the share of texts in which it is positive."""
    values = answers(model, needles, hooks)
    of_pairs, right = values.view(-1, 2).mean(1), (values > 0).double().mean().item()
    return of_pairs.mean().item(), (of_pairs.std() / len(of_pairs) ** 0.5).item(), right
