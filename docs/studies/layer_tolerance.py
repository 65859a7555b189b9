"""Do more additive layers and heads tolerate perturbed positions better, as [A] (Han and Ji, arXiv 2503.13305) explains
the tolerance of whole models?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import rankdata
from shared.rows import Row, losses
from shared.texts import Source, how_many, parts

import tl_posdisent as tp

TEXTS, LENGTH, DRAWS = 4, 256, 2000


def rows(model: Any, source: Source) -> Iterator[Row]:
    """Rank correlations of r with the cost of exchanged neighbours (positions 1 and 2, 3 and 4, …): over layers with
    the loss added by a layer alone, over heads with the estimated divergence. The control is what the same layer or
    head costs with every distance at 5: a cost, given how much its distances matter at all."""
    texts = parts(model, source, how_many(model, source, TEXTS), LENGTH)
    exchanged = torch.cat([torch.tensor([0]), (torch.arange(LENGTH - 2) ^ 1) + 1, torch.tensor([LENGTH - 1])])
    r = tp.additivity(model, texts, progress=False).groupby(["layer", "head"])["r"].mean()
    base, rows = losses(model, texts).mean(), []
    for layer in range(model.cfg.n_layers):
        hooks = [tp.swap_positions(model, exchanged, layers=[layer]), tp.dummy_distance(model, 5, layers=[layer])]
        rows.append([float(losses(model, texts, change).mean() - base) for change in hooks])
    layers = pd.DataFrame(rows, columns=["exchanged", "all"]).assign(r=r.groupby("layer").mean().to_numpy())
    edits = {"exchanged": tp.swap_positions(model, exchanged), "all": tp.dummy_distance(model, 5)}
    effects = tp.head_effects(model, texts, edits, exact=0, draws=8, progress=False)
    heads = effects.pivot(index=["layer", "head"], columns="intervention", values="curvature").assign(r=r)
    for unit, table in (("layers", layers), ("heads", heads)):
        for given in ((), ("all",)):
            value, p = correlation(table, given)
            name = "rank correlation of r with the cost of exchanged neighbours"
            name += f"{', given that of distance 5' * len(given)}, {unit}"
            over = f"{len(table)} {unit}, {len(texts)} texts"
            yield Row(name, value, torch.nan, over, LENGTH, "swap_positions")
            yield Row(f"{name}, p of a random order", p, torch.nan, f"{DRAWS} orders", LENGTH, "swap_positions")


def correlation(table: pd.DataFrame, given: tuple[str, ...]) -> tuple[float, float]:
    """The correlation of the ranks of r and of the cost after a linear fit of the ranks of others, and the share of
    random orders with a larger one."""
    design = np.stack([np.ones(len(table)), *(rankdata(table[name]) for name in given)], 1)
    r, cost = (
        x - design @ np.linalg.lstsq(design, x, rcond=None)[0] for x in map(rankdata, (table["r"], table["exchanged"]))
    )
    generator, value = np.random.default_rng(0), float(np.corrcoef(r, cost)[0, 1])
    drawn = [np.corrcoef(generator.permutation(r), cost)[0, 1] for _ in range(DRAWS)]
    return value, float(np.mean(np.abs(drawn) >= abs(value)))
