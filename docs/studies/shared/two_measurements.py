"""How far two measurements of every head on different texts differ."""

from __future__ import annotations

from time import process_time
from typing import Any

import pandas as pd
import torch
from torch import Tensor

import tl_posdisent as tp

HEAD = ["layer", "head"]
LENGTH, TEXTS = 128, 16


def means(values: Tensor, n: int) -> Tensor:
    """``[set, head]`` of ``[text, head]``: each n texts in turn are a set."""
    return values.view(-1, n, values.shape[1]).mean(1)


def compared(sets: Tensor) -> dict[str, float]:
    """Each set ``[set, head]`` with the next."""
    pairs = sets.view(len(sets) // 2, 2, -1)
    ranks = [pd.Series(a).corr(pd.Series(b), method="spearman") for a, b in pairs.tolist()]
    return {
        "error": float((pairs[:, 0] - pairs[:, 1]).square().mean().div(2).sqrt()),
        "spread": float(sets.mean(0).std()),
        "rank": sum(ranks) / len(ranks),
        "pairs": len(pairs),
    }


def additivity(model: Any, texts: Tensor) -> pd.DataFrame:
    return tp.additivity(model, texts, progress=False).groupby(HEAD, as_index=False).mean()


def column(table: pd.DataFrame, name: str) -> Tensor:
    """``[layer * head]``: a column in the order of the heads."""
    return torch.tensor(table.sort_values(HEAD)[name].to_numpy())


def costs(model: Any, text: Tensor, interventions: Any, repeats: int = 5) -> tuple[float, float]:
    """The cost of ``head_effects`` without runs: of a text, and of each draw, in forward passes by processor time."""

    def seconds(action: Any) -> float:
        begun = process_time()
        action()
        return process_time() - begun

    effects = {"tokens": text, "interventions": interventions, "exact": 0, "progress": False}
    with torch.no_grad():
        forward = min(seconds(lambda: model(text)) for _ in range(repeats))
    few, many = (
        min(seconds(lambda d=d: tp.head_effects(model, draws=d, **effects)) for _ in range(repeats)) for d in (4, 16)
    )
    of_draw = (many - few) / 12
    return (few - 4 * of_draw) / forward, of_draw / forward
