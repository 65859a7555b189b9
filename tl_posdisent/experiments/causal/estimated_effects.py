"""Estimates of the effect of interventions on every head, from gradients and the changes of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from tl_posdisent.experiments.causal.text_parts import Part
from tl_posdisent.experiments.measuring.metrics import as_numbers, values_of
from tl_posdisent.experiments.measuring.result_gradients import ResultGradients, result_gradients
from tl_posdisent.hooks.edits.edit import Edit
from tl_posdisent.hooks.edits.score_edits import ResultEdit
from tl_posdisent.hooks.hook_list import Chosen, Hooks
from tl_posdisent.models.running.forward_pass import Hook
from tl_posdisent.models.running.partial_forward import attempted, changed_results, has_hooks
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.precision import mismatch
from tl_posdisent.utils.validation import shown

InterventionHead = tuple[str, int, int]
"""The name of an intervention, a layer and a head."""


@dataclass(frozen=True, eq=False)
class LayerIntervention:
    """An intervention in one layer: its name, the heads on which it acts there, and its hooks in all layers."""

    name: str
    layer: int
    heads: tuple[int, ...]
    hooks: Hooks

    def hooks_on(self, heads: Sequence[int]) -> Hooks:
        """Return the hooks in this layer, for these of its heads alone."""
        in_layer = [x for x in self.hooks.interventions if x.spec.layer == self.layer]
        restricted = [replace(x, heads=tuple(head for head in x.heads if head in heads)) for x in in_layer]
        return Hooks(x for x in restricted if x.heads)


def separate_layers(interventions: Mapping[str, Sequence[Hook]], chosen: Chosen) -> list[LayerIntervention]:
    """Separate interventions by layer, for the chosen heads.

    Raises:
        ValueError: functions of the user's, or that need several texts; an intervention on none of the chosen heads.
    """
    by_layer: list[LayerIntervention] = []
    for name, hooks in interventions.items():
        if not isinstance(hooks, Hooks) or hooks.others or any(_of_others(x.edit) for x in hooks.interventions):
            raise ArgumentError(
                "interventions",
                "must be hooks of this package, each acting on a text alone, got functions of your own, or mode "
                f'"resample", for {name!r}: intervention_losses runs the model under any hooks',
            )
        changed = {(x.spec.layer, head) for x in hooks.interventions for head in x.heads}
        changed_heads = {
            spec.layer: tuple(head for head in heads if (spec.layer, head) in changed) for spec, heads in chosen
        }
        if not any(changed_heads.values()):
            raise ArgumentError("interventions", f"must act on the chosen heads, got {shown(hooks)} for {name!r}")
        by_layer += [LayerIntervention(name, layer, heads, hooks) for layer, heads in changed_heads.items() if heads]
    return by_layer


def _of_others(edit: Edit) -> bool:
    return isinstance(edit, ResultEdit) and edit.of_others


@dataclass(frozen=True, eq=False)
class Estimates:
    """Estimates for each head under each intervention, this head changed alone.

    Attributes:
        rows: what each column belongs to.
        first: first-order effects on the metric.
        curvature: estimates of the divergence of the predictions, in nats per prediction; NaN without draws.
        n_predictions: number of predictions of each text.
    """

    rows: list[InterventionHead]
    first: Float64[Tensor, "text row"]
    curvature: Float64[Tensor, "text row"]
    n_predictions: Float64[Tensor, " text"]


def estimated_effects(
    model: Any,
    interventions: Sequence[LayerIntervention],
    parts: Sequence[Part],
    n_texts: int,
    *,
    draws: int,
    seed: int,
    bar: Any,
    by_position: bool = False,
) -> Estimates:
    """Estimate the effect of each intervention on each of its heads alone, for each text.

    With ``g`` the gradient of the metric with respect to a head's z, ``δ`` the change of this z under the intervention
    and ``s`` the gradient of the surprise at one draw of labels, ``first`` is ``g · δ`` and ``curvature`` the mean over
    draws of ``(s · δ)² / 2``, divided by the number of predictions.

    Args:
        interventions: what is changed in each layer; each head has a row.
        parts: the texts, each part with its own metric.
        n_texts: number of texts of all parts together.
        draws: number of draws of labels for each text; 0 for none.
        seed: seed of the labels.
        bar: a progress bar, which counts forward passes of a text.
        by_position: whether curvature is the sum of that of the changes at each position, ``½ Σ_i δ_iᵀ F_ii δ_i``. It
            leaves out what changes at two positions do together to one prediction, and has a fraction of the noise: a
            square of each position's product, instead of one of their sum.

    Returns:
        Estimates ``[text, row]`` in the order of the batch, with a row for each intervention, layer and head.

    Raises:
        ValueError: what ``changes_of_results`` refuses.
    """
    rows = [(x.name, x.layer, head) for x in interventions for head in x.heads]
    first, curvature = torch.full((2, n_texts, len(rows)), torch.nan, dtype=torch.float64)
    n_predictions = torch.zeros(n_texts, dtype=torch.float64)
    for x in changes_of_results(model, interventions, parts, draws=draws, seed=seed, bar=bar):
        with torch.no_grad():
            products = torch.einsum("gtphd,tphd->gtph", x.gradients, x.change)[..., list(x.intervention.heads)].cpu()
        first_row = rows.index((x.intervention.name, x.intervention.layer, x.intervention.heads[0]))
        of_heads = slice(first_row, first_row + len(x.intervention.heads))
        n_predictions[x.texts] = x.n_predictions
        first[x.texts, of_heads] = products[0].sum(1)
        if draws:
            parts_of_change = products[1:] if by_position else products[1:].sum(2, keepdim=True)
            curvature[x.texts, of_heads] = parts_of_change.square().sum(2).mean(0) / 2 / x.n_predictions
    return Estimates(rows, first, curvature, n_predictions)


class ChangedResults(NamedTuple):
    """The change of a layer's z under an intervention, and gradients with respect to z.

    Attributes:
        intervention: the intervention in this layer.
        texts: places of the texts in the batch; they have one length.
        gradients: of the metric of each text, then of the surprise at each draw of labels.
        change: the change of z, given what the layer receives in the unmodified run.
        n_predictions: number of predictions of each of these texts.
    """

    intervention: LayerIntervention
    texts: Int[Tensor, " text"]
    gradients: Float64[Tensor, "gradient text pos head size"]
    change: Float64[Tensor, "text pos head size"]
    n_predictions: int


def changes_of_results(
    model: Any, interventions: Sequence[LayerIntervention], parts: Sequence[Part], *, draws: int, seed: int, bar: Any
) -> Iterator[ChangedResults]:
    """Yield what each intervention changes in each layer and text.

    Args:
        parts: the texts, each part with its own metric.
        draws: number of draws of labels for each text.
        bar: a progress bar, which counts forward passes of a text.

    Raises:
        ValueError: interventions that need several texts; a metric or draws that ``result_gradients`` refuses.
    """
    layers, n_names = sorted({x.layer for x in interventions}), len({x.name for x in interventions})
    separate: dict[int, bool] = {}
    for part in parts:
        runs = _differentiate(model, part, layers, draws, seed)
        bar.update((2 + draws) * len(part.places))
        for group, run in zip(part.texts.groups, runs, strict=True):
            texts = part.places[group.rows.cpu()]
            for layer in layers:
                if layer not in separate:
                    separate[layer] = _is_separate(model, group.tokens, layer, run)
                metric_gradient = len(part.places) * run.metric[layer].double()  # the metric is averaged over texts
                gradients = torch.stack([metric_gradient, *(by_layer[layer].double() for by_layer in run.surprise)])
                for intervention in (x for x in interventions if x.layer == layer):
                    z = _changed_z(model, group.tokens, intervention, run, separate[layer])
                    change = z.double() - run.z[layer].double()
                    yield ChangedResults(intervention, texts, gradients, change, run.n_predictions)
            bar.update(n_names * len(texts) / 2)


def _differentiate(model: Any, part: Part, layers: Sequence[int], draws: int, seed: int) -> list[ResultGradients]:
    """Run and differentiate a part, with labels that depend only on the seed and a text's place in the batch."""
    uniforms = []
    for group in part.texts.groups:
        generators = [np.random.default_rng((seed, int(place))) for place in part.places[group.rows.cpu()]]
        drawn = [generator.random((draws, group.tokens.shape[1])) for generator in generators]
        uniforms.append(torch.as_tensor(np.stack(drawn, 1)))
    groups = [group.tokens for group in part.texts.groups]
    return result_gradients(model, groups, layers, partial(_mean_metric, part), uniforms)


def _mean_metric(part: Part, outputs: list[Any]) -> Tensor:
    """Compute a metric, averaged over texts, with its graph."""
    value = values_of(part.metric, outputs, part.texts)
    as_numbers(value, len(part.texts.tokens))  # raises for what is not a number or one per text
    if not isinstance(value, Tensor):
        raise ArgumentError("metric", f"must return a tensor to be differentiated, got {shown(value)}")
    return value.double().mean()


def _is_separate(model: Any, tokens: Int[Tensor, "text pos"], layer: int, run: ResultGradients) -> bool:
    """Say whether a layer's z can be computed from the input of its block alone."""
    if has_hooks(model):
        return False
    again = attempted(lambda: changed_results(model, tokens, layer, run.before.get(layer), []))
    return again is not None and again.shape == run.z[layer].shape and mismatch(again, run.z[layer]) <= 1


def _changed_z(
    model: Any, tokens: Int[Tensor, "text pos"], intervention: LayerIntervention, run: ResultGradients, separate: bool
) -> Float[Tensor, "text pos head size"]:
    """Compute a layer's z under an intervention, given what the layer receives in the unmodified run."""
    layer, hooks = intervention.layer, intervention.hooks_on(intervention.heads)
    try:
        z = changed_results(model, tokens, layer, run.before.get(layer), hooks, skip=separate)
    except ValueError as error:
        raise ArgumentError("interventions", f"must act on each text alone; {intervention.name!r}: {error}") from error
    assert z is not None
    return z
