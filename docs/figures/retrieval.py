"""Studies of ``real_models.py``: heads that retrieve needles, what the model loses without them, in needles and other
texts, and which frequencies of RoPE they need (arXiv 2606.21249)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import nan
from typing import Any, Literal

import numpy as np
import pandas as pd
from torch import Tensor
from without_rotation import Change, copies, losses, row, speeches

import tl_posdisent as tp
from tl_posdisent.experiments import Needles, needle_texts
from tl_posdisent.experiments.retrieval.retrieval_heads import needle_differences

Head = tuple[int, int]
By = Literal["copying", "attention"]
LENGTH, LENGTHS, PAIRS = 256, (256, 512), 12
COUNT = 8  # heads that are knocked out, or whose frequencies are removed
QUARTERS = (0.25, 0.5)  # of the subspaces, those that rotate slowest
TOLERANCE = 0.1  # by which the energy of another band may differ, relative
BANDS = 3  # other bands at most


@cache
def scored(model: Any, length: int, pairs: int) -> tp.experiments.RetrievalHeads:
    """Both scores, with as few knock-outs as possible; once for all studies."""
    needles, few = (needle_texts(model, length=length, pairs=n, seed=seed) for seed, n in enumerate((pairs, 2)))
    return tp.retrieval_heads(model, needles, few, count=1, draws=1, progress=False)


def retrieval_scores(model: Any, length: int = LENGTH, pairs: int = PAIRS) -> pd.DataFrame:
    """Per head: both scores."""
    return scored(model, length, pairs).heads


def retrieval_knockout(
    model: Any, lengths: Sequence[int] = LENGTHS, count: int = COUNT, pairs: int = PAIRS
) -> pd.DataFrame:
    """What the model loses without the first heads by each score; longer texts without the first by copying."""
    runs: list[tuple[By, int, int]] = [("copying", n, pairs // (1 + m)) for m, n in enumerate(lengths)]
    needles, tables = needle_texts(model, length=lengths[0], pairs=pairs, seed=0), list[pd.DataFrame]()
    for by, length, size in [*runs, ("attention", lengths[0], pairs)]:
        heldout = needle_texts(model, length=length, pairs=size, seed=1)
        found = tp.retrieval_heads(model, needles, heldout, by=by, count=count, progress=False)
        tables.append(found.knockout.assign(by=by, length=length, n=count, pairs=size))
    return pd.concat(tables, ignore_index=True)


def retrieval_losses(
    model: Any, texts: int = 4, draws: int = 3, count: int = COUNT, pairs: int = PAIRS, length: int = LENGTH
) -> pd.DataFrame:
    """What prose, the second copy of random tokens and needles lose without heads (``losing``)."""
    found, labels = scored(model, length, pairs), tp.head_labels(model, seeds=0, progress=False)
    top, induction = found.top(count), labels.set_index(["layer", "head"])["induction"]
    needles, copied = needle_texts(model, length=length, pairs=pairs, seed=1), (length - 1) // 2
    kinds = {"prose": (speeches(model, texts, length), 1), "second copy": (copies(model, texts, copied), copied + 2)}
    rows = list[dict[str, Any]]()
    for kind, (tokens, first) in kinds.items():
        base = losses(model, tokens)[:, first - 1 :].mean(1)
        rows.append(row(Change("none", "", nan, []), kind, f"from {first} on", base))
        for change in losing(model, top, induction, draws, tokens[:2]):
            added = losses(model, tokens, change.hooks)[:, first - 1 :].mean(1) - base
            rows.append(row(change, kind, f"from {first} on", added))
    for change in losing(model, top, induction, 0, needles.tokens[:4]):
        values = needle_differences(model, needles, change.hooks).view(-1, 2).mean(1)
        rows.append(row(change, "needles", "last", values))
    return pd.DataFrame(rows).rename(columns={"change": "ablated", "where": "heads"})


def losing(model: Any, top: list[Head], induction: pd.Series, draws: int, reference: Tensor) -> Iterator[Change]:
    """Mean ablation of the first heads; the first alone; as many of most induction attention; those of the first that
    are among these, and the others; and random ones of the layers of the first."""
    most = induction.nlargest(len(top)).index.tolist()
    sets = {"first heads": top, "first head": top[:1], "most induction": most}
    sets["first heads, most induction"] = [head for head in top if head in most]
    sets["first heads, others"] = [head for head in top if head not in most]
    sets |= {f"random heads #{seed}": random_heads([*induction.index], top, seed) for seed in range(draws)}
    for name, heads in sets.items():
        if heads:
            where = " ".join(f"L{layer}H{head}" for layer, head in heads)
            hooks = tp.ablate_heads(model, heads, mode="mean", reference=reference)
            yield Change(name.partition(" #")[0], where, float(name.partition(" #")[2] or nan), hooks)


def random_heads(heads: Sequence[Head], top: Sequence[Head], seed: int) -> list[Head]:
    """As many heads of each layer as it has among the first, drawn from the others."""
    generator, found = np.random.default_rng(seed), list[Head]()
    for layer in sorted({layer for layer, _ in top}):
        others = [head for head in heads if head[0] == layer and head not in top]
        n = sum(each == layer for each, _ in top)
        found += [others[place] for place in generator.choice(len(others), n, replace=False)]
    return found


def retrieval_rotation(
    model: Any, lengths: Sequence[int] = LENGTHS, count: int = COUNT, pairs: int = PAIRS
) -> pd.DataFrame:
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


def last_heads(heads: pd.DataFrame, top: Sequence[Head]) -> list[Head]:
    """As many heads of each layer as it has among the first, those whose scores are closest to 0."""
    counts = pd.Series([layer for layer, _ in top]).value_counts()
    by_size = heads.assign(size=heads["copying"].abs())
    some = [by_size[by_size["layer"] == layer].nsmallest(n, "size") for layer, n in counts.items()]
    return [*pd.concat(some)[["layer", "head"]].itertuples(index=False, name=None)]


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


def difference(model: Any, needles: Needles, hooks: Any) -> tuple[float, float, float]:
    """Answer minus decoy, its standard error over pairs, and the share of texts in which it is positive."""
    values = needle_differences(model, needles, hooks)
    of_pairs, right = values.view(-1, 2).mean(1), (values > 0).double().mean().item()
    return of_pairs.mean().item(), (of_pairs.std() / len(of_pairs) ** 0.5).item(), right
