"""Which frequencies of RoPE do heads that retrieve need (arXiv 2606.21249)?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import nan
from typing import Any

import numpy as np
import pandas as pd
from shared.retrieval import COUNT, LENGTHS, PAIRS, Head, difference, last_heads, scored
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.experiments import needle_texts

GEMMA = {"lengths": (256,), "pairs": 8}  # it takes twice as long
QUARTERS = (0.25, 0.5)  # of the subspaces, those that rotate slowest
TOLERANCE = 0.1  # by which the energy of another band may differ, relative
BANDS = 3  # other bands at most


def table(model: Any, lengths: Sequence[int] = LENGTHS, count: int = COUNT, pairs: int = PAIRS) -> pd.DataFrame:
    """Answer minus decoy with frequencies removed, in heads that retrieve and in others of their layers; half as many
    texts of the second length."""
    found = scored(model, lengths[0], pairs)
    top = found.top(count)
    sets = {"retrieval heads": top, "other heads": last_heads(found.heads, top)}
    tables = []
    for m, length in enumerate(lengths):
        needles = needle_texts(model, length=length, pairs=pairs // (1 + m), seed=2)
        rows = [("", "unchanged", nan, *difference(model, needles, []))]
        for where, some in sets.items():
            for change, removed, hooks in changes(model, needles.tokens[:2], some, bands=BANDS if some is top else 0):
                rows.append((where, change, removed, *difference(model, needles, hooks)))
        table = pd.DataFrame(rows, columns=["where", "change", "energy", "difference", "se", "right"])
        tables.append(table.assign(length=length, pairs=pairs // (1 + m)))
    return pd.concat(tables, ignore_index=True)


def changes(model: Any, tokens: Tensor, heads: list[Head], bands: int) -> Iterator[tuple[str, float, Any]]:
    """Names, the energy that is removed, and hooks."""
    energies = energy(model, tokens, heads)
    for share in QUARTERS:
        n = round(share * len(energies))
        slow, *others = equal_bands(energies, n, bands)
        named = [(f"slowest {share:g}", slow), *((f"as much energy as slowest {share:g}", x) for x in others)]
        for name, band in named:
            ends = energies.index[band[0]], energies.index[band[-1]]
            hooks = tp.limit_frequencies(model, min(ends), max(ends), mode="drop", side="inside", heads=heads)
            yield name, float(energies.iloc[list(band)].sum()), hooks


def energy(model: Any, tokens: Tensor, heads: list[Head]) -> pd.Series:
    """The share of each frequency in ``Σ_c |q_c| |k_c|``, mean over heads, by frequency, the slowest first."""
    table = tp.subspace_patterns(model, tokens, progress=False)
    table = table.set_index(["layer", "head"]).loc[heads].reset_index()
    size = (
        (table["query_size"] * table["key_size"])
        .groupby([table["layer"], table["head"]])
        .transform(lambda x: x / x.sum())
    )
    found = size.groupby(table["frequency"]).sum().sort_index()
    return found / found.sum()


def equal_bands(energies: pd.Series, n: int, bands: int) -> list[range]:
    """The n slowest subspaces, and other bands, spread evenly, whose energy is closest to theirs."""
    wanted, found = energies.iloc[:n].sum(), list[range]()
    for first in range(n, len(energies)):
        sums = energies.iloc[first:].cumsum()
        last = int((sums - wanted).abs().argmin())
        if abs(sums.iloc[last] / wanted - 1) < TOLERANCE:
            found.append(range(first, first + last + 1))
    places = np.linspace(0, len(found) - 1, min(bands, len(found))).round().astype(int)
    return [range(n), *(found[place] for place in places)]
