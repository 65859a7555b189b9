"""Exact effects of interventions on some heads, alone or together, one run each."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.experiments.causal.head_search import HeadSearch
from tl_posdisent.experiments.measuring.metrics import as_numbers, is_loss, values_of
from tl_posdisent.experiments.measuring.named_interventions import NamedIntervention
from tl_posdisent.experiments.measuring.result_gradients import predictions
from tl_posdisent.experiments.measuring.runs import Change, HooksOf, Runs, Trusted
from tl_posdisent.experiments.measuring.text_parts import Part
from tl_posdisent.experiments.measuring.token_losses import divergences, losses_and_divergences
from tl_posdisent.models.running.forward_pass import Hook
from tl_posdisent.models.running.partial_forward import changed_results
from tl_posdisent.models.running.results import at_results
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.progress import SLACK
from tl_posdisent.utils.statistics import weighted_means

Place = tuple[int, int, int | tuple[int, ...]]
"""Number of an intervention, layer, and the head or heads that are changed."""


class Outcome(NamedTuple):
    """What one run changes in each text.

    Attributes:
        effects: change of the metric: of each text's own, or of that of all texts together.
        divergences: KL(unmodified ‖ changed), in nats per prediction; NaN without predictions.
    """

    effects: Float64[Tensor, " text"]
    divergences: Float64[Tensor, " text"]


def exact_effects(
    model: Any,
    items: Sequence[NamedIntervention],
    places: Sequence[Place],
    parts: Sequence[Part],
    n_texts: int,
    bar: Any,
    trusted: Trusted,
) -> dict[Place, Outcome]:
    """Run texts with the heads of each place changed; texts of a batch that are in none of the parts are NaN."""
    found = {
        place: Outcome(*(torch.full((n_texts,), torch.nan, dtype=torch.float64, device="cpu") for _ in range(2)))
        for place in places
    }
    by_layer: dict[int, list[Place]] = {}
    for place in sorted(places, key=lambda place: place[:2]):
        by_layer.setdefault(place[1], []).append(place)
    for part in parts if places else []:
        texts = part.texts
        runs = Runs(model, texts, sorted(by_layer), trusted=trusted)
        bar.update(len(part.places))
        baseline = as_numbers(values_of(part.metric, runs.clean, texts), len(texts.tokens))
        clean = [predictions(output, group.tokens) for output, group in zip(runs.clean, texts.groups, strict=True)]
        for layer, some in sorted(by_layer.items()):
            hooks = {n: _hooks(part, runs, model, items[n], layer) for n in dict.fromkeys(n for n, _, _ in some)}
            changes = [Change(items[n].name, _heads(at), hooks[n]) for n, _, at in some]
            each = runs.each(layer, changes)
            for place, run in zip(some, each, strict=True):
                try:
                    values, kl = _measured(run(), clean, part)
                except ArgumentError as error:
                    raise ArgumentError(
                        "interventions",
                        f"must leave outputs that can be measured; {items[place[0]].name!r} in layer {layer}: {error}",
                    ) from error
                found[place].effects[part.places] = values - baseline
                found[place].divergences[part.places] = kl
                bar.update(_share(model, layer) * len(part.places))
    return found


def search_largest(
    model: Any,
    items: Sequence[NamedIntervention],
    searches: Mapping[int, HeadSearch],
    parts: Sequence[Part],
    n_predictions: Float64[Tensor, " text"],
    bar: Any,
) -> dict[Place, Outcome]:
    """Run what searches for the largest divergences ask for, by number of intervention, until they end."""
    found: dict[Place, Outcome] = {}
    n_texts, trusted = len(n_predictions), dict[Hashable, bool]()
    while places := [(n, *run) for n, search in searches.items() for run in search.next_runs()]:
        bar.total = bar.n + n_texts * n_passes(model, places) + SLACK
        found |= exact_effects(model, items, places, parts, n_texts, bar, trusted)
        means, _ = weighted_means(torch.stack([found[place].divergences for place in places], 1), n_predictions)
        for n, search in searches.items():
            own = [(place[1:], float(mean)) for place, mean in zip(places, means, strict=True) if place[0] == n]
            search.note(dict(own))
    return found


def n_passes(model: Any, places: Sequence[Place]) -> float:
    """Number of forward passes of each text: one per place from its layer on, and the unmodified run."""
    return sum(_share(model, layer) for _, layer, _ in places) + bool(places)


def _share(model: Any, layer: int) -> float:
    """The share of a pass that begins at a layer."""
    return 1 - layer / len(model.blocks)


def _heads(some: int | tuple[int, ...]) -> tuple[int, ...]:
    return (some,) if isinstance(some, int) else some


def _hooks(part: Part, runs: Runs, model: Any, item: NamedIntervention, layer: int) -> HooksOf:
    """Return the hooks of an intervention; if it has none of one head, hooks that write the changed z of heads."""
    if item.divisible:
        return partial(_of_item, item, layer)
    hooks = item.in_layer(layer)
    changed = [
        changed_results(model, group.tokens, layer, before, hooks)
        for group, before in zip(part.texts.groups, runs.before(layer), strict=True)
    ]

    def write(group: int, heads: Sequence[int], z: Tensor) -> Tensor:
        new = changed[group]
        assert new is not None
        at = torch.tensor(heads, device=z.device)
        return z.index_copy(2, at, new[:, :, at].to(z))

    return lambda group, heads: [at_results(layer, model.cfg.n_heads, partial(write, group, list(heads)))]


def _of_item(item: NamedIntervention, layer: int, group: int, heads: Sequence[int]) -> list[Hook]:
    return item.of(layer, heads)


def _measured(
    outputs: Sequence[Any], clean: Sequence[Tensor | None], part: Part
) -> tuple[Float64[Tensor, "*text"], Float64[Tensor, " text"]]:
    """Compute a run's metric, and each text's mean divergence from the clean predictions, in the order of the texts."""
    texts = part.texts
    if is_loss(part.metric):  # its texts have one length: log-probabilities serve both
        ([group], [output], [before]) = texts.groups, outputs, clean
        assert before is not None  # without log-probabilities, the unmodified run has no such loss
        losses, kl = losses_and_divergences(output, group.tokens, before)
        return as_numbers(losses.double().mean(1), len(texts.tokens)), kl.double().mean(1).cpu()
    found = torch.full((len(part.places),), torch.nan, dtype=torch.float64, device="cpu")
    for group, p, output in zip(texts.groups, clean, outputs, strict=True):
        q = predictions(output, group.tokens)
        if p is not None and q is not None:
            found[group.rows.cpu()] = divergences(p, q).double().mean(1).cpu()
    return as_numbers(values_of(part.metric, outputs, texts), len(texts.tokens)), found
