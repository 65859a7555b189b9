"""What do the scores depend on among near and among far keys?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from shared.rows import Row, row
from shared.texts import Source, parts

import tl_posdisent as tp

TEXTS, LENGTH = 4, 256
RANGES = ((0, 256), (256, 512), (3840, 4096))


def rows(model: Any, source: Source) -> Iterator[Row]:
    """The share of the distance in the variance of scores, over ranges of equal width. Only of models whose layers all
    see far keys."""
    if "local" in set(tp.read_model(model).to_frame()["attention"]):
        return
    texts = parts(model, source, TEXTS, LENGTH)
    for name, one in {"trained": model, "random": next(tp.random_control(model, [0]))}.items():
        for start, stop in RANGES:
            options: dict[str, Any] = {"distances": range(start, stop), "sinks": 1, "progress": False}
            shares = [tp.controlled_distance(one, text[None], **options)["distance"].mean() for text in texts]
            what = f"share of distance, distances {start} to {stop - 1}, {name}"
            yield row(what, torch.tensor(shares), LENGTH, "controlled_distance(model, text, distances=…)")
