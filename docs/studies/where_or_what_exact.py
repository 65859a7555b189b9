"""How near are estimates of the where–what plane to runs of the heads, by position and by text?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from shared.texts import demo_texts, parts, repeated
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.experiments.causal.estimated_effects import changes_of_results, separate_layers
from tl_posdisent.experiments.causal.text_parts import parts_of
from tl_posdisent.experiments.measuring.metrics import next_token_loss
from tl_posdisent.experiments.needs.replacements import CONSTANTS, folds
from tl_posdisent.experiments.needs.shares import shares
from tl_posdisent.experiments.needs.where_or_what import _with_runs
from tl_posdisent.hooks.hook_list import any_heads, pairs_of
from tl_posdisent.models.running.forward_pass import running

DRAWS = (4, 16)
SIZES = ((8, 96, 40), (8, 256, 20), (4, 1024, 8))
"""Numbers of texts, their length, and the number of heads that are run."""
GEMMA = {"sizes": ((6, 96, 20),)}


def table(model: Any, sizes: Sequence[tuple[int, int, int]] = SIZES) -> pd.DataFrame:
    """One row per kind and length of texts, way of summing curvature and number of draws (four in longer texts):
    estimates of heads at equal steps of contribution against runs of these heads. For the demo model, the first size
    and the same texts with passages that are read twice."""
    rows = []
    for name, tokens, heads in cases(model, sizes):
        draws = DRAWS if tokens.shape[1] <= sizes[0][1] else DRAWS[:1]
        by_kind, exact, n_predictions, layers = measured(model, tokens, heads, max(draws))
        rows += [
            {"texts": name, "number": len(tokens), "length": tokens.shape[1], "curvature": kind, "draws": n}
            | compared(x[..., :n].mean(-1), exact, n_predictions, layers)
            for kind, x in by_kind.items()
            for n in draws
        ]
        print(pd.DataFrame(rows).round(3).to_string(), flush=True)
    return pd.DataFrame(rows)


def cases(model: Any, sizes: Sequence[tuple[int, int, int]]) -> Iterator[tuple[str, Tensor, int]]:
    """The name of the texts, the texts, and how many heads to run."""
    if model.cfg.d_vocab > 10_000:
        for n, length, heads in sizes:
            yield "speeches", parts(model, "speeches", n, length), heads
    else:
        n, length, heads = sizes[0]
        texts = demo_texts(n, length)
        yield from (("texts", texts, heads), ("passages read twice", repeated(texts), heads))


def measured(model: Any, tokens: Tensor, heads: int, draws: int) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Estimates ``[replacement, text, head, draw]`` by kind, divergences of runs ``[replacement, text, head]``, the
    number of predictions of each text, and the layer of each head that was run."""
    chosen = any_heads(model, None, None)
    _, of_folds = folds(model, tokens, None, chosen)
    names, places = list(of_folds[0].replacements), pairs_of(chosen)
    changes = [separate_layers(fold.replacements, chosen) for fold in of_folds]
    shape = (len(names), len(tokens), len(places), draws)
    found = {kind: torch.zeros(shape, dtype=torch.float64) for kind in ("by position", "by text")}
    n_predictions = torch.zeros(len(tokens), dtype=torch.float64)
    with running(model), tqdm(disable=True) as bar:
        for fold, of_fold in zip(of_folds, changes, strict=True):
            part = parts_of(fold.texts, next_token_loss)
            for x in changes_of_results(model, of_fold, part, draws=draws, seed=0, bar=bar):
                products = torch.einsum("gtphd,tphd->gtph", x.gradients[1:], x.change)
                rows = torch.tensor([fold.rows[text] for text in x.texts.tolist()])
                n_predictions[rows] = float(x.n_predictions)
                for kind, parts_of_change in (("by position", products), ("by text", products.sum(2, keepdim=True))):
                    curvature = parts_of_change.square().sum(2).permute(1, 2, 0) / 2 / x.n_predictions
                    for head in x.intervention.heads:
                        place = places.index((x.intervention.layer, head))
                        found[kind][names.index(x.intervention.name), rows, place] = curvature[:, head]
        order = found["by text"][0].mean((0, 2)).argsort(descending=True)
        run = order[torch.linspace(0, 0.9 * (len(order) - 1), heads).long().unique()].sort().values
        nothing = torch.full(shape[:3], torch.nan, dtype=torch.float64)
        exact = _with_runs(model, of_folds, changes, nothing, places, set(run.tolist()), progress=False)
    layers = torch.tensor([places[n][0] for n in run.tolist()])
    return {kind: x[:, :, run] for kind, x in found.items()}, exact[:, :, run], n_predictions, layers


def compared(estimates: Tensor, exact: Tensor, n_predictions: Tensor, layers: Tensor) -> dict[str, Any]:
    """Correlations, median errors, and the share of heads in the same half; correlations of the first third of layers
    alone; the median ratio of estimated to measured contribution."""
    one, other = (shares(x[0], x[1], x[2], x[3:], n_predictions, CONSTANTS) for x in (estimates, exact))
    early = (layers <= layers.max() // 3).numpy()
    row: dict[str, Any] = {"heads": len(one)}
    for name in ("where", "what"):
        a, b = (x[f"{name}_unclipped"].clip(-1).to_numpy() for x in (one, other))
        row |= {f"r_{name}": np.corrcoef(a, b)[0, 1], f"r_{name}_early": np.corrcoef(a[early], b[early])[0, 1]}
        row |= {f"error_{name}": np.median(abs(a - b)), f"bias_{name}": (a - b).mean()}
        row[f"same_half_{name}"] = ((a > 0.5) == (b > 0.5)).mean()
    a, b = one["contribution"].to_numpy(), other["contribution"].to_numpy()
    return row | {"r_log_contribution": np.corrcoef(np.log(a), np.log(b))[0, 1], "level": np.median(a / b)}
