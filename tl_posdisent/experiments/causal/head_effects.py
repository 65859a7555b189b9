"""Effects of interventions on every head: estimated for all heads at once by gradients, exact for the largest.

Let z be the results of the heads (``hook_z``), and δ the change of one head's z under an intervention, given the inputs
of the unmodified run. It takes no run of the whole model. With g the gradient of a metric for z, and F the Fisher
information of the model's predictions with respect to z, the effect of the intervention on this head alone is about::

    first order         g · δ             of any metric: attribution patching
    curvature           ½ δᵀ F δ          KL(unmodified ‖ changed), and the second order of the loss (Gauss-Newton)

F is estimated with labels drawn from the model's own predictions: ``δᵀ F δ = E[(s · δ)²]``, where s is the gradient of
their total surprise. Each draw takes one backward pass for all heads and all interventions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, Context
from math import nan
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.experiments.causal.estimated_effects import (
    InterventionHead,
    LayerIntervention,
    estimated_effects,
    separate_layers,
)
from tl_posdisent.experiments.causal.exact_effects import Outcome, exact_effects
from tl_posdisent.experiments.causal.text_parts import RUN_TOKENS, differentiable_texts, parts_of
from tl_posdisent.experiments.measuring.metrics import Metric, check_metric, is_loss, metric_name, next_token_loss
from tl_posdisent.hooks.ablate import check_reach
from tl_posdisent.hooks.hook_list import Heads, any_heads
from tl_posdisent.hooks.named_hooks import Interventions, named_hooks
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.texts import Tokens
from tl_posdisent.utils.statistics import weighted_means
from tl_posdisent.utils.validation import check_integer, check_seed, head_label, listed
from tl_posdisent.utils.words import plural

_ROW_KEYS = ["intervention", "layer", "head"]


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
    exact: int | Literal["all"] = 6,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Estimate the effect of interventions on each head alone, for all heads at once; run the largest exactly.

    For each text, two passes and one backward pass per draw serve all heads and all interventions; each intervention
    takes one more pass through the attention of each layer. The estimate is quadratic in the change of a head's result,
    so it is wrong for heads whose change is large. For each intervention, the ``4 * exact`` heads of largest curvature
    are therefore run one by one, and the other heads of each layer together, once. Unless heads of a layer cancel, none
    of these alone diverges more than all of them together.

    A run begins at its layer: of a model of L layers, that of layer l takes 1 - l / L of a pass. To check this,
    one head of each intervention is also run by a full pass (see ``head_ablation``).

    Args:
        model, attention_mask, layers, heads, progress: as in ``head_ablation``.
        tokens: as in ``head_ablation``; interventions act on each text alone.
        interventions: hooks of this package by name, such as ``{"zero": ablate_heads(model, None), "5":
            dummy_distance(model, 5)}``. One list may change all heads: each head has a row of its own, in which the
            others are unmodified. Run the model under your own hooks with ``intervention_losses``.
        metric: as in ``head_ablation``, computed by torch operations that record gradients. It is called with each text
            alone if it is the loss or a ``logit_difference``, otherwise with all texts at once.
        draws: draws of labels for each text. With 0, there is no ``curvature``, and heads are run by the size of
            ``first``. Its relative error for one head is about ``sqrt(2 / (draws * texts))``.
        exact: a quarter of the number of heads that are run one by one for each intervention: how many of the largest
            divergences are likely to be among them. ``"all"`` runs each head, 0 none.
        seed: seed of the labels. A text's labels do not depend on the other texts.

    Returns:
        One row per intervention and head: ``intervention``, ``layer``, ``head``, and, averaged over the predicted
        tokens of all texts (``first``, ``estimate`` and ``exact`` of other metrics than the loss: over texts), each
        with its standard error over texts ``…_se`` (no such columns for one text):

        * ``first``: first-order effect on the metric;
        * ``curvature``: estimate of ``kl``, nats per predicted token, also the second-order effect on the loss;
        * ``estimate``: ``first + curvature`` for the loss, ``first`` for other metrics;
        * ``exact``: the effect in a run with this head changed, NaN where it was not run;
        * ``kl``: KL(unmodified ‖ changed) of the predictions in that run, nats per predicted token.

        ``kl`` can be large where ``exact`` is about 0 or negative. ``kl`` adds up changes of the predictions in either
        direction; the loss reads them at the tokens that followed, where some changes help by chance.

        Rows are in the order of interventions, layers and heads. Effects have a sign: ``table.sort_values("exact",
        key=abs, ascending=False)`` begins with the largest ones, also if they are negative. ``kl`` has none.

        ``attrs["runs"]`` has for each intervention the number of ``heads``, how many were ``run`` one by one, the head
        of ``largest`` divergence among these, the divergence that no other head exceeds alone unless heads of one layer
        cancel (``bound``; NaN without runs or predictions), and this as a sentence (``statement``).
        ``attrs["passes"]`` is the cost in forward passes of all texts; a backward pass counts as two.

    Raises:
        ValueError: interventions that are not hooks of this package for this model, act on none of the chosen heads or
            combine several texts; a metric without gradients; draws for a model that returns no logits; what
            ``head_ablation`` refuses.

    Example:
        >>> from tl_posdisent import ablate_heads, demo_tokens, dummy_distance, head_effects, load_demo_model
        >>> model, tokens = load_demo_model(), demo_tokens(length=128).view(2, 64)
        >>> interventions = {"zero": ablate_heads(model, None), "d = 5": dummy_distance(model, 5)}
        >>> table = head_effects(model, tokens, interventions, exact=2, progress=False)
        >>> len(table)  # 40 heads, two interventions
        80
        >>> runs = table.attrs["runs"]["d = 5"]
        >>> runs["run"], bool(runs["bound"] < table.query("intervention == 'd = 5'")["kl"].max())
        (8, True)
    """
    check_metric(metric)
    check_integer("draws", draws, 0)
    if exact != "all":
        check_integer("exact", exact, 0, why="a quarter of the number of heads that are run, or 'all'")
    check_seed(seed)
    layers = listed("layers", layers)
    reading = read_model(model)
    model, chosen = reading.model, any_heads(reading, layers, heads)
    check_reach(reading, [spec.layer for spec, _ in chosen])
    texts, parts = differentiable_texts(model, tokens, attention_mask, metric)
    changes, n_texts = separate_layers(named_hooks(model, interventions), chosen), len(texts.tokens)
    with running(model) as p, p.counting_tokens() as counts:
        total = n_texts * (2 + draws + len({x.name for x in changes}) / 2) + 1e-6  # more than the rounding of fractions
        with tqdm(total=total, desc="passes", unit_scale=True, disable=not progress) as bar:
            estimates = estimated_effects(model, changes, parts, n_texts, draws=draws, seed=seed, bar=bar)
        n_predictions = estimates.n_predictions
        weights = n_predictions if is_loss(metric) else torch.ones_like(n_predictions)
        second_order = estimates.curvature if is_loss(metric) and draws else 0
        table = pd.DataFrame(estimates.rows, columns=_ROW_KEYS).astype({"head": "Int64"})
        table["first"], table["first_se"] = weighted_means(estimates.first, weights)
        table["curvature"], table["curvature_se"] = weighted_means(estimates.curvature, n_predictions)
        table["estimate"], table["estimate_se"] = weighted_means(estimates.first + second_order, weights)
        sizes = dict(zip(estimates.rows, table["curvature" if draws else "first"].abs(), strict=True))
        to_run = _heads_to_run(changes, sizes, exact, together=bool(n_predictions.all()))
        with tqdm(total=n_texts * len(to_run), desc="runs", disable=not progress) as bar:
            outcomes = exact_effects(model, to_run, parts_of(texts, metric, tokens=RUN_TOKENS), n_texts, bar)
    table = table.assign(**_exact_columns(estimates.rows, outcomes, weights, n_predictions))
    if n_texts < 2:
        table = table.drop(columns=[f"{name}_se" for name in ("first", "curvature", "estimate", "exact", "kl")])
    table.attrs["metric"] = metric_name(metric)
    table.attrs["runs"] = {
        name: _summary(rows, [x for x in outcomes if x.changed.name == name], n_predictions)
        for name, rows in table.groupby("intervention", sort=False)
    }
    table.attrs["passes"] = sum(counts) / sum(texts.lengths) / len(model.blocks) + 2 * (1 + draws)
    return reading.note(table)


def _heads_to_run(
    changes: Sequence[LayerIntervention],
    sizes: Mapping[InterventionHead, float],
    exact: int | Literal["all"],
    *,
    together: bool,
) -> list[LayerIntervention]:
    """Choose for each intervention the heads of largest estimates, one by one, and each layer's others ``together``."""
    to_run: list[LayerIntervention] = []
    for name in dict.fromkeys(x.name for x in changes):
        layers = [x for x in changes if x.name == name]
        by_size = sorted(((name, x.layer, head) for x in layers for head in x.heads), key=lambda row: -sizes[row])
        largest = by_size if exact == "all" else by_size[: 4 * exact]
        for x in layers if exact else []:
            others = tuple(head for head in x.heads if (name, x.layer, head) not in largest)
            to_run += [replace(x, heads=(head,)) for head in x.heads if head not in others]
            to_run += [replace(x, heads=others)] if others and together else []
    return to_run


def _exact_columns(
    rows: Sequence[InterventionHead],
    outcomes: Sequence[Outcome],
    weights: Float64[Tensor, " text"],
    n_predictions: Float64[Tensor, " text"],
) -> dict[str, Float64[np.ndarray, " row"]]:
    """Average the outcomes of heads that were run alone over texts; NaN in the other rows."""
    run_alone = {(x.changed.name, x.changed.layer, *x.changed.heads): x for x in outcomes}
    not_run = torch.full_like(weights, nan)
    effects = [run_alone[row].effects if row in run_alone else not_run for row in rows]
    divergences = [run_alone[row].divergences if row in run_alone else not_run for row in rows]
    exact, exact_se = weighted_means(torch.stack(effects, 1), weights)
    kl, kl_se = weighted_means(torch.stack(divergences, 1), n_predictions)
    return {"exact": exact, "exact_se": exact_se, "kl": kl, "kl_se": kl_se}


def _summary(rows: pd.DataFrame, outcomes: Sequence[Outcome], n_predictions: Tensor) -> dict[str, Any]:
    """Summarise the runs of one intervention: the largest divergence, and what no other head exceeds."""
    kl, n_run, largest, bound = rows["kl"], int(rows["exact"].notna().sum()), "", nan
    statement = f"{n_run} of {plural(len(rows), 'head')} were run"
    if kl.notna().any():
        together = [x.divergences[:, None] for x in outcomes if len(x.changed.heads) > 1]
        bound = max((weighted_means(x, n_predictions)[0].item() for x in together), default=0.0)
        largest = head_label(*rows[["layer", "head"]].to_numpy()[kl.argmax()])
        statement += f": {largest} diverges most, by {kl.max():.2g} nats per prediction"
        if n_run < len(rows):
            limit = float(Context(prec=2, rounding=ROUND_CEILING).create_decimal_from_float(bound))
            statement += f"; no other head alone diverges by more than {limit:g}, unless heads of one layer cancel"
    elif n_run:
        statement += ", and nothing limits the effects of the others"
    return {"heads": len(rows), "run": n_run, "largest": largest, "bound": bound, "statement": statement}
