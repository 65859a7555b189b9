"""Sixteen exact distances and one far distance, in a third of the layers at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from shared.rows import Row, losses, row
from shared.texts import Source, how_many, parts

import tl_posdisent as tp

FAR = 255
LONG = 1024


def far(model: Any, exact: int, distance: int, **where: Any) -> Any:
    """Hooks: distances up to ``exact`` as they are, all others one distance."""
    return tp.remap_distance(model, lambda d: torch.where(d > exact, distance, d), **where)


def squeezed(model: Any, length: int, **where: Any) -> Any:
    """Hooks: distances up to 16 as they are, all others in their order in 16 to 64."""
    return tp.remap_distance(model, lambda d: torch.where(d > 16, 16 + (d - 16) * 48 / (length - 16), d), **where)


def rows(model: Any, source: Source) -> Iterator[Row]:
    """The same in a third of the layers at a time, in the second half of long texts."""
    texts = parts(model, source, how_many(model, source, 4), LONG)
    base, n = losses(model, texts, first=LONG // 2), model.cfg.n_layers
    for third, start in (("first", 0), ("second", 1), ("last", 2)):
        layers = list(range(n * start // 3, n * (start + 1) // 3))
        near, apart = far(model, 16, 16, layers=layers), squeezed(model, LONG, layers=layers)
        for name, hooks in (("255", far(model, 16, FAR, layers=layers)), ("16", near), ("in 16 to 64", apart)):
            added = losses(model, texts, hooks, LONG // 2) - base
            name = f"added loss, 16 exact, others {name}, {third} third of the layers"
            yield row(name, added, LONG, "remap_distance(model, function, layers=…)")
