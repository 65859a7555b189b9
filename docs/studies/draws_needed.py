"""How many draws of labels does an estimate of every head's divergence need?"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from shared.speeches import three_parts
from shared.two_measurements import LENGTH, TEXTS, compared, costs, means
from torch import Tensor
from tqdm.auto import tqdm

import tl_posdisent as tp
from tl_posdisent.experiments.causal.estimated_effects import changes_of_results, separate_layers
from tl_posdisent.experiments.causal.text_parts import differentiable_texts
from tl_posdisent.experiments.measuring.metrics import next_token_loss
from tl_posdisent.hooks.hook_list import any_heads
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.running.forward_pass import running

DRAWS = 48


def table(model: Any, of: int = TEXTS, draws: int = DRAWS) -> pd.DataFrame:
    """One row per intervention and number of draws and texts: how far two estimates of every head's divergence differ.

    Texts and random orders are those of ``text_needed``. ``error``, ``spread`` and ``rank`` are of two sets of texts,
    each with draws of its own; ``error_draws`` and ``rank_draws`` of other draws for the *same* texts, so the square
    of ``error`` is the sum of that of ``error_draws`` and of the variance over texts. ``passes`` is the cost of both
    interventions together for such a set, in forward passes of one text, by processor time.
    """
    texts = three_parts(model)[:of, :LENGTH]
    interventions = {
        "mean output": tp.ablate_heads(model, None, mode="mean", reference=texts[:4]),
        "distance 5": tp.dummy_distance(model, 5),
    }
    by_text = [curvatures(model, text, interventions, draws, seed) for seed, text in enumerate(texts[:, None])]
    of_text, of_draw = costs(model, texts[:1], interventions)
    generator, rows = torch.Generator().manual_seed(0), []
    orders = [torch.randperm(of, generator=generator) for _ in range(8)]
    for name in interventions:
        by_draw = torch.stack([estimates[name] for estimates in by_text])  # text, draw, head
        for d in (4, 8, 16, 24):
            one, other = by_draw[:, :d].mean(1), by_draw[:, draws // 2 :][:, :d].mean(1)
            for n in (1, 2, 4, 8)[: of.bit_length() - 1]:
                sets = torch.cat([means(one[order], n) for order in orders])
                same = torch.stack([sets, torch.cat([means(other[order], n) for order in orders])], 1).flatten(0, 1)
                again = {f"{key}_draws": value for key, value in compared(same).items() if key in ("error", "rank")}
                size = {"measure": name, "draws": d, "texts": n, "tokens": n * texts.shape[1]}
                rows.append(size | compared(sets) | again | {"passes": n * (of_text + d * of_draw)})
                print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def curvatures(model: Any, text: Tensor, interventions: Any, draws: int, seed: int) -> dict[str, Tensor]:
    """``[draw, head]`` by intervention: what each draw of labels estimates of the divergence, nats per prediction."""
    reading = read_model(model)
    _, parts = differentiable_texts(model, text, None, next_token_loss)
    changes = separate_layers(interventions, any_heads(reading, None, None))
    by_layer: dict[str, list[Tensor]] = {name: [] for name in interventions}
    with running(reading.model), tqdm(desc="passes", disable=True) as bar:
        for x in changes_of_results(reading.model, changes, parts, draws=draws, seed=seed, bar=bar):
            products = torch.einsum("gtphd,tphd->gth", x.gradients[1:], x.change)[:, 0]
            by_layer[x.intervention.name].append(products.square() / 2 / x.n_predictions)
    return {name: torch.cat(layers, 1) for name, layers in by_layer.items()}
