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

from collections.abc import Sequence
from math import nan
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.experiments.causal.estimated_effects import Estimates
from tl_posdisent.experiments.causal.exact_effects import ExactEffects
from tl_posdisent.experiments.causal.metrics import Metric, check_metric, metric_name, next_token_loss
from tl_posdisent.experiments.causal.named_interventions import (
    Interventions,
    NamedIntervention,
    named_interventions,
    rows_by_layer,
)
from tl_posdisent.experiments.causal.text_parts import differentiable_texts, parts_of
from tl_posdisent.hooks.hook_list import Heads, any_heads
from tl_posdisent.models.reading.forward_pass import running
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.texts import Tokens
from tl_posdisent.utils.progress import progress_bar
from tl_posdisent.utils.validation import check_integer, check_seed


def head_effects(
    model: Any,
    tokens: Tokens,
    interventions: Interventions,
    metric: Metric = next_token_loss,
    *,
    attention_mask: Tensor | None = None,
    layers: Layers = None,
    heads: Heads = None,
    draws: int = 4,
    exact: int = 16,
    audit: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Estimate the effect of interventions on each head alone, for all heads at once; measure the largest exactly.

    For each text, two passes and one backward pass per draw serve all heads and all interventions; each intervention
    takes one more pass through the attention of each layer. One run per head takes that for a single head. The estimate
    is quadratic in the change of a head's result, so it is wrong for heads whose change is large: run the largest
    exactly, and let a random sample of the others show how far to trust the rest (``attrs["audit"]``).

    Args:
        model, attention_mask, layers, heads, progress: as in ``head_ablation``.
        tokens: as in ``head_ablation``; interventions act on each text alone.
        interventions: hooks by name, such as ``{"zero": ablate_heads(model, None), "5": dummy_distance(model, 5)}``.
            One list may change all heads: each head has a row of its own, in which the others are unmodified. Your own
            hooks ``(name, function)`` may change attention too, for instance a pattern. A function of
            ``tl_posdisent.hooks`` can be given by name, or by name and arguments: ``("dummy_distance", {"distance":
            5})`` (for sweeps, which store arguments as JSON; a mean is then that of ``tokens``).
        metric: as in ``head_ablation``, computed by torch operations that record gradients. It is called with each text
            alone if it is the loss or a ``logit_difference``, otherwise with all texts at once.
        draws: draws of labels for each text. With 0, there is no ``curvature``. Its relative error for one head is
            about ``sqrt(2 / (draws * texts))``.
        exact: for each intervention, number of heads with the largest estimates that are run one by one.
        audit: for each intervention, number of random other heads that are run as well.
        seed: seed of the labels and of the audit. A text's labels do not depend on the other texts.

    Returns:
        One row per intervention and head: ``intervention``, ``layer``, ``head`` (missing where a layer's results are
        not laid out by heads: the effect is that of all its heads together), and for the mean over texts, each with its
        standard error over texts ``…_se`` (NaN for one text):

        * ``first``: first-order effect on the metric;
        * ``curvature``: estimate of ``kl``, nats per predicted token, also the second-order effect on the loss;
        * ``estimate``: ``first + curvature`` for the loss, ``first`` for other metrics;
        * ``exact``: the effect in a run with this head changed, NaN where it was not run;
        * ``kl``: KL(unmodified ‖ changed) of the predictions in that run, nats per predicted token.

        ``attrs["audit"]`` has for each intervention the numbers of heads run as the largest (``exact``) and at random
        (``audited``), the rank correlation of estimates and exact effects among the latter (``rank_correlation``, by
        size), and how many of these belong among the largest known effects and were not chosen (``overlooked``).

    Raises:
        ValueError: interventions that are not hooks of this model, act on none of the chosen heads or combine several
            texts; a metric without gradients; draws for a model that returns no logits; what ``head_ablation`` refuses.

    Example:
        >>> from tl_posdisent import ablate_heads, demo_tokens, dummy_distance, head_effects, load_demo_model
        >>> model, tokens = load_demo_model(), demo_tokens(length=128).view(2, 64)
        >>> interventions = {"zero": ablate_heads(model, None), "d = 5": dummy_distance(model, 5)}
        >>> table = head_effects(model, tokens, interventions, exact=4, audit=4, progress=False)
        >>> len(table), int(table["exact"].notna().sum())  # 40 heads, two interventions
        (80, 16)
        >>> largest = table[table["intervention"] == "d = 5"].nlargest(1, "exact")
        >>> bool((largest["exact"] > 0.05).item())
        True
    """
    check_metric(metric)
    for name, value in {"draws": draws, "exact": exact, "audit": audit}.items():
        check_integer(name, value, 0)
    check_seed(seed)
    reading = read_model(model, layers)
    model, among = reading.model, any_heads(reading, layers, heads)
    texts, parts = differentiable_texts(model, tokens, attention_mask, metric)
    items = named_interventions(model, interventions, rows_by_layer(reading, among, heads), texts)
    names = {item.name: n for n, item in enumerate(items)}
    n_runs = sum(min(exact + audit, item.n_rows) for item in items)
    total = len(texts.tokens) * (2 + draws + (len(items) + n_runs) / 2)
    with running(model), progress_bar(total=total, desc="passes", unit_scale=True, disable=not progress) as bar:
        estimates = Estimates(model, items, len(texts.tokens), draws, seed, bar)
        for part in parts:
            estimates.add(part)
        estimates.check_changes()
        table = _table(items, estimates, metric)
        chosen = _chosen(table, exact, audit, seed)
        places = {row: (names[table["intervention"][row]], *_place(table, row)) for row in chosen}
        effects = ExactEffects(model, items, len(texts.tokens), list(places.values()), bar)
        bar.total = bar.n + len(texts.tokens) * effects.n_passes
        for part in parts_of(texts, metric, tokens=estimates.tokens_at_once):
            effects.add(part)
    for name, found in {"exact": effects.effects, "kl": effects.divergences}.items():
        _fill(table, name, {row: found[place] for row, place in places.items()})
    table.attrs["audit"] = {name: _audit(some, chosen) for name, some in table.groupby("intervention", sort=False)}
    return reading.note(table)


def _table(items: Sequence[NamedIntervention], estimates: Estimates, metric: Metric) -> pd.DataFrame:
    """Tabulate the estimates, averaged over texts."""
    rows = [(item.name, layer, head) for item in items for layer, heads in item.rows.items() for head in heads]
    table = pd.DataFrame(rows, columns=["intervention", "layer", "head"]).astype({"head": "Int64"})
    first, curvature = (
        torch.cat([effects for of_item in found for effects in of_item.values()], 1)
        for found in (estimates.first, estimates.curvature)
    )
    estimate = first + curvature if metric is next_token_loss and estimates.draws else first
    for name, values in {"first": first, "curvature": curvature, "estimate": estimate}.items():
        table[name], table[f"{name}_se"] = _mean_and_error(values)
    table.attrs["metric"] = metric_name(metric)
    return table


def _mean_and_error(values: Float64[Tensor, "text row"]) -> tuple[Any, Any]:
    """Return the mean over texts, and its standard error (NaN for one text)."""
    error = values.std(0) / len(values) ** 0.5 if len(values) > 1 else torch.full_like(values[0], torch.nan)
    return values.mean(0).numpy(), error.numpy()


def _chosen(table: pd.DataFrame, exact: int, audit: int, seed: int) -> dict[int, bool]:
    """Choose the rows that are run exactly: True for the largest estimates, False for a random sample of others."""
    chosen: dict[int, bool] = {}
    for n, (_, some) in enumerate(table.groupby("intervention", sort=False)):
        order = some["estimate"].abs().sort_values(ascending=False, kind="stable").index
        chosen |= dict.fromkeys(order[:exact], True)
        others = np.random.default_rng((seed, n)).permutation(np.sort(order[exact:]))
        chosen |= dict.fromkeys(others[:audit].tolist(), False)
    return chosen


def _place(table: pd.DataFrame, row: int) -> tuple[int, int | None]:
    head = table["head"][row]
    return int(table["layer"][row]), None if pd.isna(head) else int(head)


def _fill(table: pd.DataFrame, name: str, found: dict[int, Float64[Tensor, "text"]]) -> None:
    """Write values by text into some rows, averaged; the other rows are NaN."""
    table[[name, f"{name}_se"]] = nan
    if found:
        mean, error = _mean_and_error(torch.stack([*found.values()], 1))
        table.loc[list(found), name], table.loc[list(found), f"{name}_se"] = mean, error


def _audit(some: pd.DataFrame, chosen: dict[int, bool]) -> dict[str, float | int]:
    """Compare the estimates of one intervention with exact effects."""
    largest, drawn = ([row for row in some.index if chosen.get(row) is kind] for kind in (True, False))
    return audit_of(some["estimate"].abs(), some["exact"].abs(), largest, drawn)


def audit_of(
    estimates: pd.Series, exact: pd.Series, largest: Sequence[Any], drawn: Sequence[Any]
) -> dict[str, float | int]:
    """Compare estimates with runs, for heads that were run for their ``largest`` estimates and others that were drawn.

    ``overlooked`` is the number of drawn heads whose exact number is among those of the largest.
    """
    ranks = pd.DataFrame({"estimate": estimates[drawn], "exact": exact[drawn]}).rank()
    correlation = ranks["estimate"].corr(ranks["exact"]) if len(drawn) > 2 else nan
    top = exact[[*largest, *drawn]].nlargest(len(largest)).index
    counts = {"exact": len(largest), "audited": len(drawn), "overlooked": sum(head in drawn for head in top)}
    return {**counts, "rank_correlation": float(correlation)}
