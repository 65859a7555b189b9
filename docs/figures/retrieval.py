"""Studies of ``real_models.py``: heads that retrieve needles, what the model loses without them, and whether distances
or frequencies of RoPE matter to them (arXiv 2606.21249)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import nan
from typing import Any, Literal

import numpy as np
import pandas as pd
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.experiments import Needles, needle_texts
from tl_posdisent.experiments.retrieval.needles import needle_differences

Head = tuple[int, int]
By = Literal["copying", "attention"]
LENGTH, LENGTHS, PAIRS = 256, (256, 512), 12
COUNT = 8  # heads that are knocked out, or whose frequencies are removed
QUARTERS = (0.25, 0.5)  # of the subspaces, those that rotate slowest
TOLERANCE = 0.1  # by which the energy of another band may differ, relative
BANDS = 3  # other bands at most


def _found(
    model: Any, lengths: Sequence[int], count: int, pairs: int, by: By = "copying"
) -> tp.experiments.RetrievalHeads:
    """Heads scored in texts of the first length, and knocked out in others; half as many of the second length."""
    needles = needle_texts(model, length=lengths[0], pairs=pairs, seed=0)
    heldout = [needle_texts(model, length=n, pairs=pairs // (1 + m), seed=1) for m, n in enumerate(lengths)]
    return tp.retrieval_heads(model, needles, heldout=heldout, by=by, counts=[count], progress=False)


@cache
def _scored(model: Any, length: int, pairs: int) -> tp.experiments.RetrievalHeads:
    """The scores of ``_found``, with as few knock-outs as possible; once for all studies."""
    needles, few = (needle_texts(model, length=length, pairs=n, seed=seed) for seed, n in enumerate((pairs, 2)))
    return tp.retrieval_heads(model, needles, heldout=few, counts=[1], draws=1, progress=False)


def retrieval_scores(model: Any, length: int = LENGTH, pairs: int = PAIRS) -> pd.DataFrame:
    """Per head: both scores."""
    return _scored(model, length, pairs).heads


def retrieval_knockout(
    model: Any, lengths: Sequence[int] = LENGTHS, count: int = COUNT, pairs: int = PAIRS
) -> pd.DataFrame:
    """What the model loses without the first heads by each score; longer texts without the first by copying."""
    copying, attention = _found(model, lengths, count, pairs), _found(model, lengths[:1], count, pairs, "attention")
    tables = [copying.knockout.assign(by="copying"), attention.knockout.assign(by="attention")]
    found = pd.concat(tables, ignore_index=True)
    return found.assign(pairs=found["length"].map({n: pairs // (1 + m) for m, n in enumerate(lengths)}))


def retrieval_rotation(
    model: Any, lengths: Sequence[int] = LENGTHS, count: int = COUNT, pairs: int = PAIRS
) -> pd.DataFrame:
    """Answer minus decoy with distances limited or frequencies removed, in all heads, in those that retrieve and in
    others of their layers; half as many texts of the second length."""
    found = _scored(model, lengths[0], pairs)
    top = found.top(count)
    sets = {"all heads": None, "retrieval heads": top, "other heads": last_heads(found.heads, top)}
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


def last_heads(heads: pd.DataFrame, top: Sequence[Head]) -> list[Head]:
    """As many heads of each layer as it has among the first, those whose scores are closest to 0."""
    counts = pd.Series([layer for layer, _ in top]).value_counts()
    by_size = heads.assign(size=heads["copying"].abs())
    some = [by_size[by_size["layer"] == layer].nsmallest(n, "size") for layer, n in counts.items()]
    return [*pd.concat(some)[["layer", "head"]].itertuples(index=False, name=None)]


def changes(model: Any, tokens: Tensor, heads: list[Head] | None, bands: int) -> Iterator[tuple[str, float, Any]]:
    """Names, the energy that is removed, and hooks."""
    chosen = {} if heads is None else {"heads": heads}
    for most in (16, 64):
        yield f"distances at most {most}", nan, tp.remap_distance(model, lambda d, m=most: d.clamp(max=m), **chosen)
    energies = energy(model, tokens, heads)
    for share in QUARTERS:
        n = round(share * len(energies))
        slow, *others = equal_bands(energies, n, bands)
        for mode in ("drop", "freeze"):
            for name, band in (
                (f"slowest {share:g}", slow),
                *((f"as much energy as slowest {share:g}", x) for x in others),
            ):
                ends = energies.index[band[0]], energies.index[band[-1]]
                hooks = tp.limit_frequencies(model, min(ends), max(ends), mode=mode, side="inside", **chosen)
                yield f"{name}: {mode}", float(energies.iloc[list(band)].sum()), hooks


def energy(model: Any, tokens: Tensor, heads: list[Head] | None) -> pd.Series:
    """The share of each frequency in ``Σ_c |q_c| |k_c|``, mean over heads, by frequency, the slowest first."""
    table = tp.subspace_patterns(model, tokens, progress=False)
    if heads is not None:
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


def difference(model: Any, needles: Needles, hooks: Any) -> tuple[float, float, float]:
    """Answer minus decoy, its standard error over pairs, and the share of texts in which it is positive."""
    values = needle_differences(model, needles, hooks)
    of_pairs, right = values.view(-1, 2).mean(1), (values > 0).double().mean().item()
    return of_pairs.mean().item(), (of_pairs.std() / len(of_pairs) ** 0.5).item(), right
