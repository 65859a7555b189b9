"""Studies of ``real_models.py``: effects of every head at once, and heads replaced together."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
import trained_and_random
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.experiments import estimated_ladder
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


def head_effects(model: Any, texts: int = 4, exact: int = 30, audit: int = 30) -> pd.DataFrame:
    """Estimates and exact effects of the heads with the largest estimates and of random others, for eight
    interventions; ``largest`` says which. First parts of speeches; fits to parts of others."""
    parts = trained_and_random.texts(model)
    interventions = some_interventions(model, parts[14:18])
    table = tp.head_effects(model, parts[:texts], interventions, draws=8, exact=exact, audit=audit, progress=False)
    print(pd.DataFrame(table.attrs["audit"]).T.round(2).to_string(), flush=True)
    ranks = table.groupby("intervention")["estimate"].transform(lambda x: x.abs().rank(ascending=False))
    run = table[table["exact"].notna()].assign(largest=ranks <= exact)
    columns = ["intervention", "layer", "head", "largest", "first", "curvature", "estimate", "exact", "exact_se", "kl"]
    return run[columns].round(6)


def every_verdict(model: Any, texts: int = 24, exact: int | None = None, audit: int = 16) -> pd.DataFrame:
    """A verdict for every head, on two sets of speeches: texts are added until it is decided, three looks at most.

    Sets of 24 half parts of four speeches each; rungs are fitted to twelve of two others.
    """
    halves = torch.cat(_halves(trained_and_random.texts(model)))  # of ten speeches in turn
    speech = torch.arange(len(halves)) % trained_and_random.N
    tables = []
    for name, some in {"a": speech < 4, "b": (speech >= 4) & (speech < 8)}.items():
        table = estimated_ladder(
            model, halves[speech >= 8], heldout=halves[some][:texts], exact=exact, audit=audit, looks=3, progress=False
        )
        verdicts = tp.head_verdicts(table)
        print(name, table.attrs["audit"], verdicts["verdict"].value_counts().to_dict(), flush=True)
        run = table[table["rung"] == "uniform"][["exact", "blocks", "tokens"]].reset_index(drop=True)
        tables.append(verdicts.assign(texts=name).join(run).assign(**table.attrs["audit"]))
    columns = ["texts", "layer", "head", "verdict", "simplest", "at_most", "recovered", "se", "gap_mean", "error_mean"]
    columns += ["gap", "error", "exact", "blocks", "tokens", "audited", "above", "surely_above"]
    return pd.concat(tables, ignore_index=True)[columns]


def _halves(texts: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of each text, the second behind the text's first token too, of equal length."""
    n = texts.shape[1] // 2
    return texts[:, :n], torch.cat([texts[:, :1], texts[:, n : 2 * n - 1]], 1)


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
