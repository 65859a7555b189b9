"""Effects of interventions on every head: estimated for all heads at once by gradients, exact for some of them.

Let z be the results of the heads (``hook_z``), and δ the change of one head's z under an intervention, given the inputs
of the unmodified run. It takes no run of the whole model. With g the gradient of a metric for z, and F the Fisher
information of the model's predictions with respect to z, the effect of the intervention on this head alone is about::

    first order         g · δ             of any metric: attribution patching
    curvature           ½ δᵀ F δ          KL(unmodified ‖ changed), and the second order of the loss (Gauss-Newton)

F is estimated with labels drawn from the model's own predictions: ``δᵀ F δ = E[(s · δ)²]``, where s is the gradient of
their total surprise. Each draw takes one backward pass for all heads and all interventions.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from tl_posdisent.experiments.causal.estimated_effects import Estimates, estimated_effects
from tl_posdisent.experiments.causal.exact_effects import Outcome, Place, search_largest
from tl_posdisent.experiments.measuring.metrics import Metric, check_metric, is_loss, metric_name, next_token_loss
from tl_posdisent.experiments.measuring.named_interventions import (
    Interventions,
    named_interventions,
    rows_by_layer,
)
from tl_posdisent.experiments.measuring.text_parts import differentiable_texts, parts_of
from tl_posdisent.hooks.hook_list import Heads, any_heads
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.texts import Tokens
from tl_posdisent.utils.progress import progress_bar
from tl_posdisent.utils.statistics import weighted_means
from tl_posdisent.utils.validation import check_integer, check_seed, listed


def head_effects(
    model: Any,
    tokens: Tokens,
    interventions: Interventions,
    metric: Metric = next_token_loss,
    *,
    attention_mask: Tensor | None = None,
    layers: Layers = None,
    heads: Heads = None,
    draws: int = 16,
    exact: int | Literal["all"] = 4,
    most: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Estimate the effect of interventions on each head alone, for all heads at once; run the largest exactly.

    For each text, two passes and one backward pass per draw serve all heads and all interventions; each intervention
    takes one more pass through the attention of each layer. One run per head takes that for a single head.

    The estimate is quadratic in the change of a head's result, so it is wrong for heads whose change is large. The
    heads of largest curvature are therefore run one by one, and all other heads of each layer together. Unless heads
    of a layer cancel, none alone diverges more than all together; so heads are run until no layer has room for another
    one of the ``exact`` largest divergences.

    Args:
        model, attention_mask, layers, heads, progress: as in ``head_ablation``.
        tokens: as in ``head_ablation``; interventions act on each text alone.
        interventions: hooks by name, such as ``{"zero": ablate_heads(model, None), "5": dummy_distance(model, 5)}``.
            One list may change all heads: each head has a row of its own, in which the others are unmodified. Your own
            hooks ``(name, function)`` may change attention too, for instance a pattern, alone or in a list with hooks
            of this package. A function of ``tl_posdisent.hooks`` can be given by name, or by name and arguments:
            ``("dummy_distance", {"distance": 5})`` (for sweeps, which store arguments as JSON; a mean is then that of
            ``tokens``).
        metric: as in ``head_ablation``, computed by torch operations that record gradients. It is called with each text
            alone if it is the loss or a ``logit_difference``, otherwise with all texts at once.
        draws: draws of labels for each text. With 0, there is no ``curvature``, and heads are run by the size of
            ``first``. Its relative error for one head is about ``sqrt(2 / (draws * texts))``.
        exact: for each intervention, how many heads with the largest divergences to find. Four times as many are
            run at first. ``"all"`` runs each head, 0 none.
        most: for each intervention, at most so many heads are run one by one, besides one run for each layer; default
            as many as the search takes.
        seed: seed of the labels. A text's labels do not depend on the other texts.

    Returns:
        One row per intervention and head: ``intervention``, ``layer``, ``head``, and, averaged over the predicted
        tokens of all texts (``first``, ``estimate`` and ``exact`` of other metrics than the loss: over texts), each
        with its standard error over texts ``…_se`` (NaN for one text):

        * ``first``: first-order effect on the metric;
        * ``curvature``: estimate of ``kl``, nats per predicted token, also the second-order effect on the loss;
        * ``estimate``: ``first + curvature`` for the loss, ``first`` for other metrics;
        * ``exact``: the effect in a run with this head changed, NaN where it was not run;
        * ``kl``: KL(unmodified ‖ changed) of the predictions in that run, nats per predicted token.

        Rows are in the order of interventions, layers and heads. Effects have a sign: ``table.sort_values("exact",
        key=abs, ascending=False)`` begins with the largest ones, also if they are negative. ``kl`` has none.

        ``attrs["search"]`` has for each intervention the number of ``heads``, how many were ``run``, the divergence
        that no other head exceeds alone unless heads of one layer cancel (``bound``; NaN without runs or predictions),
        layers in which they cancel by the estimates (``cancelling``), and this as a sentence (``statement``).
        ``attrs["passes"]`` is the cost in forward passes of all texts; a backward pass counts as two.

    Raises:
        ValueError: interventions that are not hooks of this model, act on none of the chosen heads or combine several
            texts; a metric without gradients; draws for a model that returns no logits; what ``head_ablation`` refuses.

    Example:
        >>> from tl_posdisent import ablate_heads, demo_tokens, dummy_distance, head_effects, load_demo_model
        >>> model, tokens = load_demo_model(), demo_tokens(length=128).view(2, 64)
        >>> interventions = {"zero": ablate_heads(model, None), "d = 5": dummy_distance(model, 5)}
        >>> table = head_effects(model, tokens, interventions, exact=2, progress=False)
        >>> len(table)  # 40 heads, two interventions
        80
        >>> by_size = table[table["intervention"] == "d = 5"].sort_values("exact", key=abs, ascending=False)
        >>> largest = by_size.head(1)
        >>> bool((largest["exact"] > 0.05).item())
        True
        >>> table.attrs["search"]["d = 5"]["bound"] < largest["kl"].item()
        True
    """
    check_metric(metric)
    check_integer("draws", draws, 0)
    if exact != "all":
        check_integer("exact", exact, 0, why="a number of heads, or 'all'")
    if most is not None:
        check_integer("most", most, 0)
    check_seed(seed)
    layers = listed("layers", layers)
    reading = read_model(model, layers)
    model, among = reading.model, any_heads(reading, layers, heads)
    texts, parts = differentiable_texts(model, tokens, attention_mask, metric)
    items = named_interventions(model, interventions, rows_by_layer(reading, among), texts)
    with (
        running(model) as p,
        p.counting_tokens() as counts,
        progress_bar(desc="passes", unit_scale=True, disable=not progress) as bar,
    ):
        estimates = estimated_effects(model, items, texts, parts, metric, draws=draws, seed=seed, bar=bar)
        table = _table(estimates, draws)
        searches = {
            n: estimates.search(n, largest=item.n_rows if exact == "all" else exact, most=most, draws=draws)
            for n, item in enumerate(items)
        }
        parts = parts_of(texts, metric, tokens=estimates.tokens_at_once)
        found = search_largest(model, items, searches, parts, estimates.n_predictions, bar)
    _fill(table, estimates, found)
    table.attrs["search"] = {items[n].name: search.to_dict() for n, search in searches.items()}
    forward = sum(counts) / sum(texts.lengths) / len(model.blocks)
    table.attrs["passes"] = forward + 2 * (1 + draws)
    return reading.note(table)


def _table(estimates: Estimates, draws: int) -> pd.DataFrame:
    """Tabulate the estimates, averaged over texts."""
    rows = [(item.name, layer, head) for item in estimates.items for layer, head in item.places]
    table = pd.DataFrame(rows, columns=["intervention", "layer", "head"]).astype({"head": "Int64"})
    first, curvature = (torch.cat([*effects.values()], 1) for effects in (estimates.first, estimates.curvature))
    estimate = first + curvature if is_loss(estimates.metric) and draws else first
    of_effects, of_divergences = estimates.weights, estimates.n_predictions
    table["first"], table["first_se"] = weighted_means(first, of_effects)
    table["curvature"], table["curvature_se"] = weighted_means(curvature, of_divergences)
    table["estimate"], table["estimate_se"] = weighted_means(estimate, of_effects)
    table.attrs["metric"] = metric_name(estimates.metric)
    return table


def _fill(table: pd.DataFrame, estimates: Estimates, found: Mapping[Place, Outcome]) -> None:
    """Write the outcomes of heads that were run alone, averaged over texts; the other rows are NaN."""
    table[["exact", "exact_se", "kl", "kl_se"]] = nan
    places = [(n, *place) for n, item in enumerate(estimates.items) for place in item.places]
    rows = [row for row, place in enumerate(places) if place in found]
    if rows:
        effects, divergences = (torch.stack([found[places[row]][i] for row in rows], 1) for i in range(2))
        table.loc[rows, "exact"], table.loc[rows, "exact_se"] = weighted_means(effects, estimates.weights)
        table.loc[rows, "kl"], table.loc[rows, "kl_se"] = weighted_means(divergences, estimates.n_predictions)
