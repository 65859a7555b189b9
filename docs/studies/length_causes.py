"""Causes of length failure, apart from each other, in the demo model and the story model."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import torch
from shared.rows import TABLES
from shared.two_models import Case, both

import tl_posdisent as tp
from tl_posdisent.hooks import applied
from tl_posdisent.models import longer_context

TRAINED = 512
HALF = 256


def temperature(model: Any, length: int) -> list[Any]:
    """Scores times log(number of keys) / log(TRAINED), where a query sees more keys than in training."""
    seen = torch.arange(1, length + 1)
    factor = (seen.clamp_min(2).log() / math.log(TRAINED)).clamp_min(1.0)[:, None]

    def sharpen(scores: torch.Tensor, hook: Any) -> torch.Tensor:
        return torch.where(scores > -1e4, scores * factor[: scores.shape[-2]].to(scores), scores)

    return [(f"blocks.{layer}.attn.hook_attn_scores", sharpen) for layer in range(model.cfg.n_layers)]


def without_first(model: Any, n: int) -> list[Any]:
    """Hide the first keys from every query behind them."""

    def hide(scores: torch.Tensor, hook: Any) -> torch.Tensor:
        first = torch.arange(scores.shape[-1]) < n
        return scores.masked_fill(first & (torch.arange(scores.shape[-2]) >= n)[:, None], -torch.inf)

    return [(f"blocks.{layer}.attn.hook_attn_scores", hide) for layer in range(model.cfg.n_layers)]


def ways(case: Case) -> dict[str, list[Any]]:
    """What is removed: unseen distances (ceiling), the number of keys (window), the first keys (no sinks)."""
    model, length = case.model, case.long.shape[1]

    def edit(n_sink: int, window: int, ceiling: int) -> list[Any]:
        return tp.lambda_mask(model, n_sink, window, ceiling)

    ceiling, sharp = edit(0, length, TRAINED - 1), temperature(model, length)
    return {
        "as it is": [],
        "ceiling alone": ceiling,
        "ceiling, first 4 keys hidden": [*ceiling, *without_first(model, 4)],
        "window alone, no sinks": edit(0, HALF, length),
        "window and 4 sinks at their distance": edit(4, HALF, length),
        "window and 4 sinks at the ceiling": edit(4, HALF, TRAINED - 1),
        "temperature alone": sharp,
        "ceiling and temperature": [*ceiling, *sharp],
        "positions divided": tp.position_interpolation(model, length / TRAINED),
    }


def losses(case: Case, hooks: list[Any]) -> list[float]:
    """Mean loss in the second half of the trained positions, up to twice their number, and beyond."""
    length = case.long.shape[1]
    with torch.no_grad(), longer_context(case.model, length), applied(case.model, hooks):
        logits = case.model(case.long)[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, case.long[0, 1:], reduction="none")
    return [float(part.mean()) for part in (loss[HALF:TRAINED], loss[TRAINED : 2 * TRAINED], loss[2 * TRAINED :])]


def main() -> None:
    """Write ``tables/length_causes.csv``: some minutes of one core."""
    rows = []
    for case in both():
        for name, hooks in ways(case).items():
            loss = dict(zip(["trained", "to 1024", "beyond"], losses(case, hooks), strict=True))
            rows.append({"model": case.name, "way": name} | loss)
    pd.DataFrame(rows).round(3).to_csv(TABLES / "length_causes.csv", index=False)
