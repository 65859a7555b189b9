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

from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_CEILING, Context
from math import nan
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.experiments.measuring.curvature import curvature
from tl_posdisent.experiments.measuring.metrics import (
    Metric,
    check_metric,
    is_loss,
    is_separable,
    metric_name,
    metric_values,
    next_token_loss,
)
from tl_posdisent.experiments.measuring.part_runs import Head
from tl_posdisent.experiments.measuring.run_changes import Divergences, Item, run_changes
from tl_posdisent.experiments.measuring.token_losses import by_token, divergence
from tl_posdisent.hooks.ablate import check_reach
from tl_posdisent.hooks.hook_list import Chosen, Heads, Hooks, any_heads, pairs_of
from tl_posdisent.hooks.named_hooks import Interventions, named_hooks
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.running.forward_pass import Hook, running
from tl_posdisent.models.running.partial_forward import block_facts
from tl_posdisent.models.running.texts import Texts, TokenIds, Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.statistics import mean
from tl_posdisent.utils.tables import with_ends
from tl_posdisent.utils.validation import check_integer, check_seed, head_label, listed, shown
from tl_posdisent.utils.words import plural

_MEASURED = ("first", "curvature", "estimate", "exact", "kl")


def head_effects(
    model: Any,
    tokens: Tokens,
    interventions: Interventions,
    metric: Metric = next_token_loss,
    *,
    attention_mask: Tensor | None = None,
    ignore: TokenIds | None = None,
    layers: Layers = None,
    heads: Heads = None,
    draws: int = 16,
    exact: int | Literal["all"] = 6,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Estimate the effect of interventions on each head alone, for all heads at once; run the largest exactly.

    For each text, a pass and a backward pass for the metric and each draw serve all heads and all interventions; each
    intervention takes one more pass through the attention of each layer. The estimate is quadratic in the change of a
    head's result, so it is wrong for heads whose change is large. For each intervention, the ``4 * exact`` heads of
    largest curvature are therefore run one by one, and the other heads of each layer together, once. Unless heads of a
    layer cancel, none of these alone diverges more than all of them together.

    A run begins at its layer: of a model of L layers, that of layer l takes 1 - l / L of a pass (see
    ``head_ablation``).

    Args:
        model, attention_mask, ignore, layers, heads, progress: as in ``head_ablation``.
        tokens: as in ``head_ablation``; interventions act on each text alone.
        interventions: hooks of this package by name, such as ``{"zero": ablate_heads(model, None), "5":
            dummy_distance(model, 5)}``. One list may change all heads: each head has a row of its own, in which the
            others are unmodified. Run the model under your own hooks with ``intervention_losses``.
        metric: as in ``head_ablation``, computed by torch operations that record gradients. It is called with each text
            alone if it is the loss or a ``logit_difference``, otherwise with all texts at once.
        draws: draws of labels for each text. With 0, there is no ``curvature``, and heads are run by the size of
            ``first``. Its relative error for one head is about ``sqrt(2 / (draws * texts))``.
        exact: a quarter of the number of heads that are run one by one for each intervention (in ``where_or_what``, an
            integer is that number itself): how many of the largest divergences are likely to be among them. ``"all"``
            runs each head, 0 none.
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
        >>> from tl_posdisent import ablate_heads, cut_text, demo_text, dummy_distance, head_effects, load_demo_model
        >>> model = load_demo_model()
        >>> tokens = cut_text(model, demo_text(), length=64, texts=2)
        >>> interventions = {"zero": ablate_heads(model, None), "d = 5": dummy_distance(model, 5)}
        >>> table = head_effects(model, tokens, interventions, exact=2, progress=False)
        >>> len(table)  # 40 heads, two interventions
        80
        >>> runs = table.attrs["runs"]["d = 5"]
        >>> runs["run"], bool(runs["bound"] < table.query("intervention == 'd = 5'")["kl"].max())
        (8, True)
    """
    check_metric(metric, ignore)
    check_integer("draws", draws, 0)
    if exact != "all":
        check_integer("exact", exact, 0, why="a quarter of the number of heads that are run, or 'all'")
    check_seed(seed)
    layers = listed("layers", layers)
    reading = read_model(model)
    model, chosen = reading.model, any_heads(reading, layers, heads)
    check_reach(reading, [spec.layer for spec, _ in chosen])
    texts = read_texts(model, tokens, attention_mask, ignore)
    hooks = _restricted(named_hooks(model, interventions), chosen)
    heads_of, n_texts = {name: some.pairs for name, some in hooks.items()}, len(texts.tokens)
    with running(model) as p, p.counting_tokens() as counts:
        facts = block_facts(p)
        with tqdm(total=n_texts * (2 + draws + len(hooks)), desc="passes", disable=not progress) as bar:
            estimated = curvature(
                reading, texts, hooks, heads_of, draws, seed=seed, metric=metric, facts=facts, bar=bar
            )
        weights = estimated.predictions if is_loss(metric) else torch.ones_like(estimated.predictions)
        rows = [(name, *head) for name, some in heads_of.items() for head in some]
        first, curved = (torch.cat([*x.values()]).T for x in (estimated.first, estimated.curvature))
        table = pd.DataFrame(rows, columns=["intervention", "layer", "head"]).astype({"head": "Int64"})
        _add(table, "first", first, weights)
        _add(table, "curvature", curved, estimated.predictions)
        _add(table, "estimate", first + curved if is_loss(metric) and draws else first, weights)
        sizes = dict(zip(rows, table["curvature" if draws else "first"].abs(), strict=True))
        to_run = _heads_to_run(heads_of, sizes, exact, together=bool(estimated.predictions.all()))
        total = n_texts * sum(len(items) for items in to_run.values())
        with tqdm(total=total, desc="runs", disable=not progress) as bar:
            options: Any = {"together": not is_separable(metric), "facts": facts, "bar": bar}
            found = run_changes(reading, texts, hooks, to_run, _effects_and_divergences(metric), **options)
    if found.failures:
        failure = found.failures[0]
        problem = f"must leave outputs that can be measured; {failure.change!r} at {failure.label}: {failure.error}"
        raise ArgumentError("interventions", problem) from failure.error
    alone, together = _outcomes(found, to_run)
    not_run = torch.full((n_texts, 2), nan, dtype=torch.float64)
    outcomes = torch.stack([alone.get(row, not_run) for row in rows], 1)
    _add(table, "exact", outcomes[..., 0], weights)
    _add(table, "kl", outcomes[..., 1], estimated.predictions)
    table = with_ends(table, (), ["estimate", "exact", "kl"])
    if n_texts < 2:
        table = table.drop(columns=[f"{name}_se" for name in _MEASURED])
    table.attrs["metric"] = metric_name(metric)
    table.attrs["runs"] = {
        name: _summary(table[table["intervention"] == name], [x[:, 1] for x in some], estimated.predictions)
        for name, some in together.items()
    }
    table.attrs["passes"] = sum(counts) / sum(texts.lengths) / len(model.blocks) + 2 * (1 + draws)
    return reading.note(table)


def _add(
    table: pd.DataFrame, name: str, values: Float64[Tensor, "text row"], weights: Float64[Tensor, " text"]
) -> None:
    """Add the mean over texts of each row, and its standard error, to the table."""
    value, error = mean(values, weights)
    table[name], table[f"{name}_se"] = value.numpy(), error.numpy()


def _restricted(named: Mapping[str, Sequence[Hook]], chosen: Chosen) -> dict[str, Hooks]:
    """Return the hooks of each intervention on the chosen heads.

    Raises:
        ValueError: functions of the user's, or that need several texts; an intervention on none of the chosen heads.
    """
    restricted: dict[str, Hooks] = {}
    for name, hooks in named.items():
        if not isinstance(hooks, Hooks) or hooks.others or hooks.by_text:
            raise ArgumentError(
                "interventions",
                "must be hooks of this package, each acting on a text alone, got functions of your own, tensors for "
                f'the texts of a batch, or mode "resample", for {name!r}: intervention_losses runs the model under any '
                "hooks",
            )
        restricted[name] = hooks.of_heads(pairs_of(chosen))
        if not restricted[name].pairs:
            raise ArgumentError("interventions", f"must act on the chosen heads, got {shown(hooks)} for {name!r}")
    return restricted


def _effects_and_divergences(metric: Metric) -> Callable[..., Any]:
    """Return what compares texts by a metric, and by KL(unmodified ‖ changed) in nats per prediction."""

    def read(unmodified: list[Any], texts: Texts, rows: list[int]) -> Callable[[list[Any]], Float64[Tensor, "text 2"]]:
        if is_loss(metric):  # log-probabilities serve both
            of_tokens = by_token(unmodified, texts, rows)
            return lambda outputs: of_tokens(outputs).nanmean(1)
        both = [metric_values(metric)(unmodified, texts, rows), divergence(unmodified, texts, rows)]
        return lambda outputs: torch.stack([compare(outputs) for compare in both], 1)

    return read


def _heads_to_run(
    heads_of: Mapping[str, Sequence[Head]],
    sizes: Mapping[tuple[Any, ...], float],
    exact: int | Literal["all"],
    *,
    together: bool,
) -> dict[str, list[Item]]:
    """Choose for each intervention the heads of largest estimates, one by one, and each layer's others ``together``."""
    to_run: dict[str, list[Item]] = {}
    for name, heads in heads_of.items():
        by_size = sorted(heads, key=lambda head: -sizes[name, *head])
        largest = heads if exact == "all" else by_size[: 4 * exact]
        to_run[name] = [head for head in heads if head in largest]
        for layer in sorted({layer for layer, _ in heads}) if exact and together else []:
            others = tuple(head for head in heads if head[0] == layer and head not in largest)
            to_run[name] += [others if len(others) > 1 else others[0]] if others else []
    return to_run


def _outcomes(
    found: Divergences, to_run: Mapping[str, Sequence[Item]]
) -> tuple[dict[tuple[Any, ...], Tensor], dict[str, list[Tensor]]]:
    """Return the effect and the divergence in each text, ``[text, 2]``, of heads run alone, and of heads run together.

    The first are by intervention, layer and head, the others by intervention.
    """
    alone, together = dict[tuple[Any, ...], Tensor](), dict[str, list[Tensor]]()
    for name, items in to_run.items():
        together[name] = []
        for item, values in zip(items, found[name], strict=True):
            outcome = values - found.unmodified
            if isinstance(item[0], int):
                alone[(name, *item)] = outcome
            else:
                together[name].append(outcome)
    return alone, together


def _summary(rows: pd.DataFrame, together: Sequence[Tensor], n_predictions: Tensor) -> dict[str, Any]:
    """Summarise the runs of one intervention: the largest divergence, and what no other head exceeds.

    Args:
        together: divergences of the other heads of each layer, by text.
    """
    kl, n_run, largest, bound = rows["kl"], int(rows["exact"].notna().sum()), "", nan
    statement = f"{n_run} of {plural(len(rows), 'head')} were run"
    if kl.notna().any():
        bound = max((mean(x, n_predictions).value.item() for x in together), default=0.0)
        largest = head_label(*rows[["layer", "head"]].to_numpy()[kl.argmax()])
        statement += f": {largest} diverges most, by {kl.max():.2g} nats per prediction"
        if n_run < len(rows):
            limit = float(Context(prec=2, rounding=ROUND_CEILING).create_decimal_from_float(bound))
            statement += f"; no other head alone diverges by more than {limit:g}, unless heads of one layer cancel"
    elif n_run:
        statement += ", and nothing limits the effects of the others"
    return {"heads": len(rows), "run": n_run, "largest": largest, "bound": bound, "statement": statement}
