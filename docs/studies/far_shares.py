"""What do the scores depend on among near and among far keys?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from shared.rows import Row, row
from shared.texts import Source, parts

import tl_posdisent as tp
from tl_posdisent.models import read_model

TEXTS, LENGTH = 8, 256
SHARES = ["distance", "query", "key", "query:key", "distance:query:key"]
RANGES = ((0, 256), (256, 512), (1024, 1280), (3840, 4096))


def copies(model: Any) -> dict[str, Any]:
    """The model, and a copy with random weights: of the configuration's standard deviation, and of 0.02."""
    random, small = (next(tp.random_control(model, [0], std=std)) for std in ("config", 0.02))
    return {"trained": model, "random": random, "random of 0.02": small}


def rows(model: Any, source: Source) -> Iterator[Row]:
    """What the scores depend on among near and among far keys: shares of the variance over ranges of equal width. Only
    of models whose layers all see far keys."""
    if "local" in set(read_model(model).to_frame()["attention"]):
        return
    texts = parts(model, source, 4, LENGTH)
    for name, one in list(copies(model).items())[:2]:
        for start, stop in RANGES:
            options: dict[str, Any] = {"distances": range(start, stop), "sinks": 1, "progress": False}
            tables = [tp.controlled_distance(one, text[None], **options)[SHARES].mean() for text in texts]
            for share in SHARES:
                values = torch.tensor([table[share] for table in tables])
                what = f"share of {share}, distances {start} to {stop - 1}, {name}"
                yield row(what, values, LENGTH, "controlled_distance(model, text, distances=…)")
