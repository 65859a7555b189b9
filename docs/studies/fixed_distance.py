"""What do the predictions lose if all pairs have one distance?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shared.rows import Row, losses, row
from shared.texts import Source, how_many, parts

import tl_posdisent as tp

TEXTS, OTHERS, LENGTH = 8, 4, 256


def rows(model: Any, source: Source) -> Iterator[Row]:
    """The loss added where all pairs have one distance, and where all heads have their mean output over other texts."""
    n = how_many(model, source, TEXTS)
    texts, others = parts(model, source, n, LENGTH), parts(model, source, OTHERS, LENGTH, skip=n)
    base = losses(model, texts)
    added = losses(model, texts, tp.ablate_heads(model, None, mode="mean", reference=others)) - base
    yield row("added loss, mean outputs", added, LENGTH, f"ablate_heads(model, None, reference={len(others)} texts)")
    for d in (0, 5, 50):
        added = losses(model, texts, tp.dummy_distance(model, d)) - base
        yield row(f"added loss, every distance {d}", added, LENGTH, f"dummy_distance(model, {d})")
