"""Effects of interventions on every head at each position alone, estimated for all heads and positions at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.experiments.causal.estimated_effects import estimated_effects
from tl_posdisent.experiments.measuring.metrics import Metric, check_metric, metric_name, next_token_loss
from tl_posdisent.experiments.measuring.named_interventions import (
    Interventions,
    NamedIntervention,
    named_interventions,
    rows_by_layer,
)
from tl_posdisent.experiments.measuring.text_parts import differentiable_texts
from tl_posdisent.hooks.hook_list import Heads, any_heads
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.texts import Tokens
from tl_posdisent.utils.progress import progress_bar
from tl_posdisent.utils.validation import check_integer, check_seed, listed


def position_effects(
    model: Any,
    tokens: Tokens,
    interventions: Interventions,
    metric: Metric = next_token_loss,
    *,
    attention_mask: Tensor | None = None,
    layers: Layers = None,
    heads: Heads = None,
    draws: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Estimate the effect of interventions on each head at each position alone, for all heads and positions at once.

    ``head_effects`` changes a head's result at all positions of a text. Here each row changes it at one position: at
    which tokens of a text does a head's attention matter? The passes are those of ``head_effects`` without exact runs.

    Args:
        model, tokens, interventions, metric, attention_mask, layers, heads, draws, seed, progress: as in
            ``head_effects``.

    Returns:
        One row per intervention, head, text and position: ``intervention``, ``layer``, ``head``, ``batch``,
        ``position`` (from 0 at the text's first token), and

        * ``first``: first-order effect on the metric of this text. Its sum over positions, averaged over texts, is
          ``first`` of ``head_effects``;
        * ``curvature``: estimate of KL(unmodified ‖ changed) if the head's result is replaced at this position alone,
          in nats per predicted token of the text. Divergences of several positions do not add up to that of all.

        Rows are in this order; ``table.sort_values("first", key=abs, ascending=False)`` begins with the largest.

    Raises:
        ValueError: what ``head_effects`` refuses.

    Example:
        >>> from tl_posdisent import ablate_heads, demo_tokens, load_demo_model
        >>> from tl_posdisent.experiments import position_effects
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> table = position_effects(model, tokens, ablate_heads(model, None), layers=4, heads=[2], progress=False)
        >>> len(table), bool((table["curvature"] >= 0).all())
        (64, True)
        >>> int(table.loc[table["curvature"].idxmax(), "position"]) < 64  # where the result of L4H2 matters most
        True
    """
    check_metric(metric)
    check_integer("draws", draws, 0)
    check_seed(seed)
    layers = listed("layers", layers)
    reading = read_model(model, layers)
    model, among = reading.model, any_heads(reading, layers, heads)
    texts, parts = differentiable_texts(model, tokens, attention_mask, metric)
    items = named_interventions(model, interventions, rows_by_layer(reading, among), texts)
    with running(model), progress_bar(desc="passes", unit_scale=True, disable=not progress) as bar:
        estimates = estimated_effects(
            model, items, texts, parts, metric, draws=draws, seed=seed, bar=bar, by="position"
        )
    found = [
        _rows(items[n], layer, head, texts.lengths, first[:, row], estimates.curvature[n, layer][:, row])
        for (n, layer), first in estimates.first.items()
        for row, head in enumerate(items[n].rows[layer])
    ]
    table = pd.concat(found, ignore_index=True).astype({"layer": int, "head": "Int64"})
    table.attrs["metric"] = metric_name(metric)
    return reading.note(table)


def _rows(
    item: NamedIntervention,
    layer: int,
    head: int | None,
    lengths: Sequence[int],
    first: Float64[Tensor, "text pos"],
    curvature: Float64[Tensor, "text pos"],
) -> pd.DataFrame:
    """Tabulate one head: its texts one after the other, without the padding."""
    places = torch.arange(first.shape[1], device="cpu")
    real = places < torch.tensor(lengths, device="cpu")[:, None]
    columns: dict[str, Any] = {
        "intervention": item.name,
        "layer": layer,
        "head": pd.array([head] * sum(lengths), dtype="Int64"),
        "batch": np.repeat(np.arange(len(lengths)), lengths),
        "position": np.concatenate([np.arange(length) for length in lengths]),
        "first": first[real].numpy(),
        "curvature": curvature[real].numpy(),
    }
    return pd.DataFrame(columns)
