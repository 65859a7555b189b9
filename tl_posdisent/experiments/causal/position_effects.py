"""Effects of interventions on every head at each position alone, estimated for all heads and positions at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from tl_posdisent.experiments.causal.estimated_effects import ChangedResults, changes_of_results, in_layers
from tl_posdisent.experiments.causal.metrics import Metric, check_metric, metric_name, next_token_loss
from tl_posdisent.experiments.causal.text_parts import differentiable_texts
from tl_posdisent.hooks.ablate import check_reach
from tl_posdisent.hooks.hook_list import Heads, any_heads
from tl_posdisent.hooks.named_hooks import Interventions, named_hooks
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.texts import Tokens
from tl_posdisent.utils.progress import SLACK, progress_bar
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
    model, chosen = reading.model, any_heads(reading, layers, heads)
    check_reach(reading, [spec.layer for spec, _ in chosen])
    texts, parts = differentiable_texts(model, tokens, attention_mask, metric)
    changes, n_texts = in_layers(named_hooks(model, interventions), chosen), len(texts.tokens)
    order, rows = [(x.name, x.layer) for x in changes], list[pd.DataFrame]()
    with running(model), progress_bar(desc="passes", unit_scale=True, disable=not progress) as bar:
        bar.reset(total=n_texts * (2 + draws + len({x.name for x in changes}) / 2) + SLACK)
        for x in changes_of_results(model, changes, parts, draws=draws, seed=seed, bar=bar):
            rows += _rows(x, order.index((x.where.name, x.where.layer)), draws)
    table = pd.concat(rows, ignore_index=True).sort_values(["place", "head", "batch", "position"], ignore_index=True)
    table.attrs["metric"] = metric_name(metric)
    return reading.note(table.drop(columns="place").astype({"layer": int, "head": "Int64"}))


def _rows(x: ChangedResults, place: int, draws: int) -> Iterator[pd.DataFrame]:
    """Tabulate each head in each text."""
    products = torch.einsum("gtphd,tphd->gthp", x.gradients, x.change)[:, :, list(x.where.heads)].cpu()
    curvature = (
        products[1:].square().mean(0) / 2 / x.n_predictions if draws else torch.full_like(products[0], torch.nan)
    )
    for n, text in enumerate(x.texts.tolist()):
        for row, head in enumerate(x.where.heads):
            columns: dict[str, Any] = {
                "intervention": x.where.name,
                "layer": x.where.layer,
                "head": head,
                "batch": text,
            }
            columns |= {"position": range(products.shape[-1]), "first": products[0, n, row]}
            yield pd.DataFrame(columns | {"curvature": curvature[n, row], "place": place})
