"""Exact effects of interventions on heads of a layer, alone or together: one run each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.experiments.causal.estimated_effects import LayerIntervention
from tl_posdisent.experiments.causal.text_parts import Part
from tl_posdisent.experiments.measuring.metrics import as_numbers, is_loss, values_of
from tl_posdisent.experiments.measuring.result_gradients import predictions
from tl_posdisent.experiments.measuring.runs import Change, Run, Runs
from tl_posdisent.experiments.measuring.token_losses import divergences, losses_and_divergences
from tl_posdisent.hooks.hook_list import Hooks
from tl_posdisent.utils.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one run changes in each text; NaN where that was not run or has no value.

    Attributes:
        changed: the intervention and the heads of one layer that it changed together.
        effects: change of the metric: of each text's own, or of that of all texts together.
        divergences: KL(unmodified ‖ changed), in nats per prediction.
    """

    changed: LayerIntervention
    effects: Float64[Tensor, " text"]
    divergences: Float64[Tensor, " text"]


def exact_effects(
    model: Any, interventions: Sequence[LayerIntervention], parts: Sequence[Part], n_texts: int, bar: Any
) -> list[Outcome]:
    """Run texts under each intervention, on all of its heads in its layer together.

    Args:
        bar: a progress bar, which counts runs of a text.

    Raises:
        ValueError: outputs under an intervention that cannot be measured.
    """
    outcomes = {x: Outcome(x, _nan_by_text(n_texts), _nan_by_text(n_texts)) for x in interventions}
    for part, clean_outputs, changed_runs in intervention_runs(model, interventions, parts):
        texts = part.texts
        baseline = as_numbers(values_of(part.metric, clean_outputs, texts), len(texts.tokens))
        clean = [predictions(output, group.tokens) for output, group in zip(clean_outputs, texts.groups, strict=True)]
        for changed, run in changed_runs:
            try:
                values, divergences_by_text = _values_and_divergences(run(), clean, part)
            except ArgumentError as error:
                problem = f"must leave outputs that can be measured; {changed.name!r} in layer {changed.layer}: {error}"
                raise ArgumentError("interventions", problem) from error
            outcomes[changed].effects[part.places] = values - baseline
            outcomes[changed].divergences[part.places] = divergences_by_text
            bar.update(len(part.places))
    return list(outcomes.values())


def intervention_runs(
    model: Any, interventions: Sequence[LayerIntervention], parts: Sequence[Part]
) -> Iterator[tuple[Part, list[Any], Iterator[tuple[LayerIntervention, Run]]]]:
    """Yield each part, what the model returns for it unmodified, and its run under each intervention."""
    layers = sorted({x.layer for x in interventions})
    for part in parts if layers else []:
        runs = Runs(model, part.texts, layers)
        yield part, runs.clean, _changed_runs(runs, interventions)


def _changed_runs(runs: Runs, interventions: Sequence[LayerIntervention]) -> Iterator[tuple[LayerIntervention, Run]]:
    """Yield the run of each intervention, layer after layer."""
    shortcuts = runs.shortcuts
    if len({x.name for x in interventions}) == len(interventions):  # each would be compared with its full pass
        shortcuts = tuple(replace(shortcut, valid=False) for shortcut in shortcuts)
    for layer in sorted({x.layer for x in interventions}):
        in_layer = [x for x in interventions if x.layer == layer]
        changes = [Change(x.name, x.heads, partial(_hooks_on, x)) for x in in_layer]
        for intervention, (run, known) in zip(in_layer, runs.changed(layer, changes, shortcuts), strict=True):
            yield intervention, run
            shortcuts = known  # for the next layer


def _nan_by_text(n_texts: int) -> Float64[Tensor, " text"]:
    return torch.full((n_texts,), torch.nan, dtype=torch.float64)


def _hooks_on(changed: LayerIntervention, group: int, heads: Sequence[int]) -> Hooks:
    """Return the hooks of an intervention for these heads, the same for each group of texts."""
    return changed.hooks_on(heads)


def _values_and_divergences(
    outputs: Sequence[Any], clean: Sequence[Tensor | None], part: Part
) -> tuple[Float64[Tensor, "*text"], Float64[Tensor, " text"]]:
    """Compute a run's metric, and each text's mean divergence from the clean predictions, in the order of the texts."""
    texts = part.texts
    if is_loss(part.metric):  # its texts have one length: log-probabilities serve both
        ([group], [output], [clean_log_p]) = texts.groups, outputs, clean
        assert clean_log_p is not None  # without log-probabilities, the unmodified run has no such loss
        losses, kl = losses_and_divergences(output, group.tokens, clean_log_p)
        return as_numbers(losses.double().mean(1), len(texts.tokens)), kl.double().mean(1).cpu()
    by_text = _nan_by_text(len(part.places))
    for group, clean_log_p, output in zip(texts.groups, clean, outputs, strict=True):
        log_p = predictions(output, group.tokens)
        if clean_log_p is not None and log_p is not None:
            by_text[group.rows.cpu()] = divergences(clean_log_p, log_p).double().mean(1).cpu()
    return as_numbers(values_of(part.metric, outputs, texts), len(texts.tokens)), by_text
