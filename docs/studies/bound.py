"""Theorem 2 of [A] (Han and Ji, arXiv 2503.13305): the spread of keys bounds the interaction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from shared.rows import Row, row
from shared.texts import Source, how_many, parts
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.rope import Moments, interaction_bound

LENGTH = 256
FEWER = 4  # texts of studies that take many passes for each


def trained_and_random(model: Any) -> dict[str, Any]:
    return {"trained": model, "random": next(tp.random_control(model, [0]))}


def captured(model: Any, text: Tensor) -> list[Any]:
    with torch.no_grad():
        return tp.capture(model, text[None], scores=False)


def bounds(layer: Any, component: Any) -> pd.DataFrame:
    """One row per head: bounds of an interaction, their ratios to it, and whether they are bounds, up to rounding."""
    spec = layer.spec
    moments = Moments.from_qk(layer.q[0, 1:], layer.k[0, 1:], spec.rotary)
    table = interaction_bound(moments, range(layer.q.shape[1]), scale=spec.require_scale(), component=component)
    for name in ("pairwise", "separate"):
        table[f"share / {name}"] = table["share"] / table[name]
    in_order = (table["share"] <= table["pairwise"] + 1e-9) & (table["pairwise"] <= table["separate"] + 1e-9)
    return table.assign(valid=in_order.astype(float)).drop(columns="head")


def rows(model: Any, source: Source) -> Iterator[Row]:
    """Theorem 2 of [A]: the share of interactions with the distance and its two bounds; without the first token."""
    texts = parts(model, source, how_many(model, source, FEWER), LENGTH)
    for name, one in trained_and_random(model).items():
        for component in ("distance:key", "distance:query:key"):
            tables = [pd.concat([bounds(layer, component) for layer in captured(one, text)]) for text in texts]
            means = pd.DataFrame([table.mean() for table in tables])
            for column in ("share", "pairwise", "separate", "share / pairwise", "share / separate", "valid"):
                values = torch.tensor(means[column].to_numpy())
                yield row(f"{component}, {column}, {name}", values, LENGTH, "interaction_bound")
