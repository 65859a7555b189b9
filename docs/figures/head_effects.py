"""Studies of ``real_models.py``: effects of every head at once, and heads replaced together."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
import trained_and_random
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.hooks import fitted_attention, substitute_attention


def some_interventions(model: Any, fitted: Tensor) -> dict[str, Any]:
    """Eight interventions; the mean and the static attention are those of other texts."""
    n = fitted.shape[1]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    return {
        "zero": tp.ablate_heads(model, None),
        "mean": tp.ablate_heads(model, None, mode="mean", reference=fitted),
        "uniform": substitute_attention(model, "uniform"),
        "static": fitted_attention(model, fitted),
        "every distance 5": tp.dummy_distance(model, 5),
        "shuffled positions": tp.swap_positions(model, order),
        "distances at most 8": tp.remap_distance(model, lambda d: d.clamp(max=8)),
        "4 first keys and 32 last": tp.lambda_mask(model, min(4, n // 8), min(32, n // 4), n),
    }


def head_effects(model: Any, texts: int = 4, audit: int = 44) -> pd.DataFrame:
    """Estimates and exact effects of the sixteen heads with the largest estimates and of random others, for eight
    interventions; ``largest`` says which. First parts of speeches; fits to parts of others."""
    parts = trained_and_random.texts(model)
    interventions = some_interventions(model, parts[14:18])
    table = tp.head_effects(model, parts[:texts], interventions, draws=8, exact=16, audit=audit, progress=False)
    print(pd.DataFrame(table.attrs["audit"]).T.round(2).to_string(), flush=True)
    ranks = table.groupby("intervention")["estimate"].transform(lambda x: x.abs().rank(ascending=False))
    run = table[table["exact"].notna()].assign(largest=ranks <= 16)
    columns = ["intervention", "layer", "head", "largest", "first", "curvature", "estimate", "exact", "exact_se", "kl"]
    return run[columns].round(6)


def replaced_heads(model: Any) -> pd.DataFrame:
    """The cost of the first n heads replaced together, in nats per token of the first parts of four speeches; attention
    is fitted to parts of four others, and heads are ordered by parts of two more."""
    parts, n_heads = trained_and_random.texts(model), model.cfg.n_layers * model.cfg.n_heads
    interventions = some_interventions(model, parts[14:18])
    window = interventions["4 first keys and 32 last"]
    simple = {"static": interventions["static"], "window": window, "uniform": interventions["uniform"]}
    sets = {"static": simple["static"], "window": window, "cheapest of three": simple}
    counts = sorted({max(1, round(n_heads * share / 9)) for share in (0.5, 1, 2, 3, 4, 6, 9)})
    tables = []
    for name, some in sets.items():
        found = tp.replaceable_heads(
            model,
            parts[[8, 9, 18, 19]],
            some,
            heldout=parts[:4],
            counts=counts,
            beside=["random", "first order"] if name == "static" else ["random"],
            progress=False,
        )
        print(name, found, found.order["intervention"].value_counts().to_dict(), flush=True)
        tables.append(found.curve.assign(replaced_by=name))
    columns = ["replaced_by", "order", "heads", "loss", "added_loss", "se", "kl"]
    return pd.concat(tables, ignore_index=True)[columns].round(5)
