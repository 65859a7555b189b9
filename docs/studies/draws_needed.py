"""How many draws of labels does an estimate of every head's divergence need?"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from shared.speeches import three_parts
from shared.two_measurements import HEAD, LENGTH, TEXTS, compared, costs, means
from torch import Tensor

import tl_posdisent as tp

DRAWS = 48


def table(model: Any, of: int = TEXTS, draws: int = DRAWS) -> pd.DataFrame:
    """One row per intervention and number of draws and texts: how far two estimates of every head's divergence differ.

    Texts and random orders are those of ``text_needed``. ``error``, ``spread`` and ``rank`` are of two sets of texts,
    each with draws of its own; ``passes`` is the cost of both interventions together for such a set, in forward passes
    of one text, by processor time.
    """
    texts = three_parts(model)[:of, :LENGTH]
    interventions = {
        "mean output": tp.ablate_heads(model, None, mode="mean", reference=texts[:4]),
        "distance 5": tp.dummy_distance(model, 5),
    }
    by_text = [
        torch.stack([curvatures(model, text, interventions, seed * draws + draw) for draw in range(draws)], 1)
        for seed, text in enumerate(texts[:, None])
    ]
    of_text, of_draw = costs(model, texts[:1], interventions)
    generator, rows = torch.Generator().manual_seed(0), []
    orders = [torch.randperm(of, generator=generator) for _ in range(8)]
    for name, by_draw in zip(interventions, torch.stack(by_text, 1), strict=True):  # text, draw, head
        for d in (4, 8, 16, 24):
            for n in (1, 2, 4, 8)[: of.bit_length() - 1]:
                sets = torch.cat([means(by_draw[:, :d].mean(1)[order], n) for order in orders])
                size = {"measure": name, "draws": d, "texts": n, "tokens": n * texts.shape[1]}
                rows.append(size | compared(sets) | {"passes": n * (of_text + d * of_draw)})
                print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def curvatures(model: Any, text: Tensor, interventions: Any, seed: int) -> Tensor:
    """``[intervention, head]``: what one draw of labels estimates of the divergence, nats per prediction."""
    table = tp.head_effects(model, text, interventions, exact=0, draws=1, seed=seed, progress=False)
    by_head = table.pivot(index=HEAD, columns="intervention", values="curvature")[list(interventions)]
    return torch.tensor(by_head.to_numpy().T.copy())
