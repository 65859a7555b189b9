"""Observation 1 of [A] (Han and Ji, arXiv 2503.13305): similar keys in fast subspaces, content in slow ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from shared.rows import Row, row
from shared.texts import Source, parts

import tl_posdisent as tp

TEXTS, LENGTH = 4, 256
CALL = "subspace_patterns(model, text)"


def rows(model: Any, source: Source) -> Iterator[Row]:
    """The similarity of keys in fast subspaces, and the slow subspaces' share of the variance of the content part."""
    texts = parts(model, source, TEXTS, LENGTH)
    for name, one in {"trained": model, "random": next(tp.random_control(model, [0]))}.items():
        tables = [tp.subspace_patterns(one, text[None], sinks=8, progress=False) for text in texts]
        fast, slow = (torch.tensor(x) for x in zip(*map(similarity_and_content, tables), strict=True))
        yield row(f"key_concentration, wavelengths below 16, {name}", fast, LENGTH, CALL)
        yield row(f"content, wavelengths above 4096, {name}", slow, LENGTH, CALL)
    share = float((tables[0].query("head == 0")["wavelength"] > 4096).mean())
    yield Row("share of subspaces, wavelengths above 4096", share, torch.nan, "", LENGTH, CALL)


def similarity_and_content(table: pd.DataFrame) -> tuple[float, float]:
    """Means over heads of the mean similarity of keys below a wavelength of 16, and of the sum of the shares of content
    above 4096, the latter over all wavelengths'."""
    head = ["layer", "head"]
    fast = table[table["wavelength"] <= 16].groupby(head)["key_concentration"].mean().mean()
    content = table.assign(slow=table["wavelength"] > 4096).groupby([*head, "slow"])["semantic"].sum().groupby("slow")
    means = content.mean()
    return float(fast), float(means.loc[True] / means.sum())
