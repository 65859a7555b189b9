"""Causes of length failure, apart from each other, in the demo model and the story model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from shared.rows import TABLES
from shared.stories import sample_story, stories_bridge
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.hooks import applied

TRAINED, HALF = 512, 256


def cases() -> Iterator[tuple[str, Any, Tensor]]:
    """Both models, each with a text of three and of five times the length of training."""
    yield "demo model", tp.load_demo_model(backend="bridge", n_ctx=1537), tp.demo_tokens(length=1537)
    yield "story model", stories_bridge(), torch.cat([sample_story(500, seed, 0.7) for seed in range(5)], 1)


def at_scores(model: Any, change: Any) -> list[Any]:
    """Hooks that change the scores of every layer."""
    return [(f"blocks.{layer}.attn.hook_attn_scores", change) for layer in range(model.cfg.n_layers)]


def ways(model: Any, length: int) -> dict[str, list[Any]]:
    """What is removed: unseen distances (ceiling), the number of keys (window), the first keys (no sinks), the spread
    of attention over more keys than in training (temperature)."""
    n_keys = torch.arange(1, length + 1)
    factor = (n_keys.clamp_min(2).log() / math.log(TRAINED)).clamp_min(1.0)[:, None]
    first_hidden = (torch.arange(length) < 4) & (torch.arange(length) >= 4)[:, None]
    sharp = at_scores(model, lambda x, hook: torch.where(x > -1e4, x * factor, x))
    ceiling = tp.lambda_mask(model, 0, length, TRAINED - 1)
    return {
        "as it is": [],
        "ceiling alone": ceiling,
        "ceiling, first 4 keys hidden": [
            *ceiling,
            *at_scores(model, lambda x, hook: x.masked_fill(first_hidden, -torch.inf)),
        ],
        "window alone, no sinks": tp.lambda_mask(model, 0, HALF, length),
        "window and 4 sinks at their distance": tp.lambda_mask(model, 4, HALF, length),
        "window and 4 sinks at the ceiling": tp.lambda_mask(model, 4, HALF, TRAINED - 1),
        "temperature alone": sharp,
        "ceiling and temperature": [*ceiling, *sharp],
        "positions divided": tp.position_interpolation(model, length / TRAINED),
    }


def main() -> None:
    """Write ``tables/length_causes.csv``: the mean loss in the second half of the trained positions, up to twice their
    number, and beyond; some minutes of one core."""
    rows = []
    for name, model, text in cases():
        for way, hooks in ways(model, text.shape[1]).items():
            with torch.no_grad(), applied(model, hooks):
                logits = model(text)[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, text[0, 1:], reduction="none")
            parts = loss[HALF:TRAINED], loss[TRAINED : 2 * TRAINED], loss[2 * TRAINED :]
            means = dict(zip(["trained", "to 1024", "beyond"], (float(part.mean()) for part in parts), strict=True))
            rows.append({"model": name, "way": way} | means)
    pd.DataFrame(rows).round(3).to_csv(TABLES / "length_causes.csv", index=False)
