"""Which layers use distances?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from shared.rows import Row, losses, row
from shared.texts import Source, how_many, parts
from torch import Tensor

import tl_posdisent as tp

LENGTH = 256
FEWER = 4  # texts of studies that take many passes for each


def rows(model: Any, source: Source) -> Iterator[Row]:
    """Which layers use distances: what is lost where one layer has every distance 5 (alone), and what its own distances
    give back where all others have it (restored); the former for two texts."""
    texts, n = parts(model, source, how_many(model, source, FEWER), LENGTH), model.cfg.n_layers
    base, collapsed = losses(model, texts), losses(model, texts, tp.dummy_distance(model, 5))
    alone, restored = [], []
    for layer in range(n):
        others = [other for other in range(n) if other != layer]
        alone.append(losses(model, texts[:2], tp.dummy_distance(model, 5, layers=[layer])) - base[:2])
        restored.append(collapsed - losses(model, texts, tp.dummy_distance(model, 5, layers=others)))
    cost = collapsed - base
    yield row("added loss, every layer", cost, LENGTH, "dummy_distance(model, 5)")
    sums = torch.stack(alone).sum(0) / cost[:2]
    yield row("costs of single layers over the cost of all", sums, LENGTH, "layers=[layer]")
    for name, effects in {"restored": restored, "alone": alone}.items():
        yield from by_third(name, torch.stack(effects))


def by_third(name: str, effects: Tensor) -> Iterator[Row]:
    """Shares of the sum of positive ``[layer, text]`` effects: by third of the layers, and of the layer with most."""
    shares = effects.clamp(min=0) / effects.clamp(min=0).sum(0)
    n = len(shares)
    for third, start in (("first", 0), ("second", 1), ("last", 2)):
        third_shares = shares[n * start // 3 : n * (start + 1) // 3]
        yield row(
            f"share of {name}, {third} third of the layers",
            third_shares.sum(0),
            LENGTH,
            f"{len(third_shares)} of {n} layers",
        )
    most = int(effects.mean(1).argmax())
    yield row(f"share of {name}, layer with most", shares[most], LENGTH, f"layer {most}")
    yield row(f"nats {name}, layer with most", effects[most], LENGTH, f"layer {most}")
