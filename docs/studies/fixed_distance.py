"""What do the predictions lose if all pairs have one distance?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from shared.rows import Row, losses, row
from shared.texts import Source, how_many, parts

import tl_posdisent as tp

TEXTS, LENGTH = 8, 256
FEWER = 4  # texts of studies that take many passes for each


def rows(model: Any, source: Source) -> Iterator[Row]:
    """The loss added where all pairs have one distance, where positions are shuffled, where they are rounded; and where
    all heads have their mean output over other texts."""
    n = how_many(model, source, TEXTS)
    texts, places = parts(model, source, n, LENGTH), torch.arange(LENGTH)
    base, others = losses(model, texts), parts(model, source, FEWER, LENGTH, skip=n)
    yield row("loss", base, LENGTH, "model(texts)")
    added = losses(model, texts, tp.ablate_heads(model, None, mode="mean", reference=others)) - base
    yield row("added loss, mean outputs", added, LENGTH, f"ablate_heads(model, None, reference={len(others)} texts)")
    for d in (0, 1, 5, 50):
        added = losses(model, texts, tp.dummy_distance(model, d)) - base
        yield row(f"added loss, every distance {d}", added, LENGTH, f"dummy_distance(model, {d})")
    orders = [torch.randperm(LENGTH, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    shuffled = torch.stack([losses(model, texts, tp.swap_positions(model, order)) - base for order in orders])
    yield row("added loss, shuffled positions", shuffled.mean(0), LENGTH, "swap_positions", "texts, 3 orders")
    added = losses(model, texts, tp.swap_positions(model, places // 2 * 2)) - base
    yield row("added loss, positions rounded to even numbers", added, LENGTH, "swap_positions(model, places // 2 * 2)")
