"""Observation 1 of [A] (Han and Ji, arXiv 2503.13305): similar keys in fast subspaces, content in slow ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from shared.rows import Row, row
from shared.texts import Source, parts

import tl_posdisent as tp

TEXTS, LENGTH = 8, 256
BANDS = {"below 16": 16.0, "16 to 256": 256.0, "256 to 4096": 4096.0, "above 4096": float("inf")}


def rows(model: Any, source: Source) -> Iterator[Row]:
    """Observation 1 of [A]: concentration of keys, and shares of a head's variance, by band of wavelengths."""
    texts = parts(model, source, 4, LENGTH)
    for name, one in {"trained": model, "random": next(tp.random_control(model, [0]))}.items():
        tables = [by_band(one, text) for text in texts]
        for band in tables[0].index:
            for column in ("key_concentration", "distance", "semantic", "content", "size"):
                values = torch.tensor([table.loc[band, column] for table in tables])
                yield row(f"{column}, wavelengths {band}, {name}", values, LENGTH, "subspace_patterns(model, text)")
    for band, share in tables[0]["subspaces"].items():
        yield Row(f"share of subspaces, wavelengths {band}", share, torch.nan, "", LENGTH, "subspace_patterns")


def by_band(model: Any, text: torch.Tensor) -> pd.DataFrame:
    """Means over heads: the concentration within a band, and the sums over its subspaces of shares of the variance, of
    mean |q| · mean |k|, and of the number of subspaces; the band's share of the content's variance."""
    table = tp.subspace_patterns(model, text[None], sinks=8, progress=False)
    table["band"] = pd.cut(table["wavelength"], [0.0, *BANDS.values()], labels=list(BANDS))
    of_head = table.groupby(["layer", "head"])
    table["size"] = table["query_size"] * table["key_size"]
    table["size"] /= of_head["size"].transform("sum")
    table["subspaces"] = 1 / of_head["subspace"].transform("size")
    heads = table.groupby(["layer", "head", "band"], observed=True)
    shares = heads[["distance", "semantic", "size", "subspaces"]].sum().join(heads["key_concentration"].mean())
    means = shares.groupby("band", observed=True).mean()
    return means.assign(content=means["semantic"] / means["semantic"].sum())
