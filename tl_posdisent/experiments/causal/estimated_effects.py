"""Estimates of the effect of interventions on every head, from gradients and the changes of results."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tl_posdisent.experiments.causal.head_search import HeadSearch
from tl_posdisent.experiments.measuring.metrics import Metric, as_numbers, is_loss, next_token_loss, values_of
from tl_posdisent.experiments.measuring.named_interventions import NamedIntervention
from tl_posdisent.experiments.measuring.result_gradients import ResultGradients, result_gradients
from tl_posdisent.experiments.measuring.text_parts import RUN_TOKENS, Part
from tl_posdisent.models.running.partial_forward import attempted, changed_results, has_hooks, of_texts
from tl_posdisent.models.running.texts import Texts
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.precision import mismatch, own_sums
from tl_posdisent.utils.progress import SLACK
from tl_posdisent.utils.statistics import weighted_means
from tl_posdisent.utils.validation import shown

By = Literal["head", "position"]
ByPlace = dict[tuple[int, int], Tensor]
"""Tensors by the number of an intervention and layer."""


@dataclass(frozen=True, eq=False)
class Estimates:
    """Estimates for each intervention and layer, by text and head (and position).

    Attributes:
        items: the interventions.
        metric: what is measured.
        first: first-order effects on the metric, ``[text, row]``; by position ``[text, row, pos]``, and NaN after the
            end of a text.
        curvature: estimates of the divergence of the predictions, in nats per prediction; NaN without draws.
        surprise: first-order effects on the surprise at the labels, ``[draw, text, row]``; none by position.
        n_predictions: number of predictions of each text.
        together: by intervention and kind of its edits, whether texts that are run together are changed as each alone;
            None where no texts were run together.
    """

    items: Sequence[NamedIntervention]
    metric: Metric
    first: ByPlace
    curvature: ByPlace
    surprise: ByPlace
    n_predictions: Float64[Tensor, " text"]
    together: dict[tuple[int, Hashable], bool | None]

    @property
    def tokens_at_once(self) -> int:
        """How many tokens of short texts may be run together with changed heads."""
        return 1 if False in self.together.values() else RUN_TOKENS

    @property
    def weights(self) -> Float64[Tensor, " text"]:
        """By which texts are averaged: predictions for the loss, texts for other metrics."""
        return self.n_predictions if is_loss(self.metric) else torch.ones_like(self.n_predictions)

    def search(self, n: int, *, largest: int, most: int | None, draws: int) -> HeadSearch:
        """Begin the search for the heads with the largest divergences under an intervention, by their estimates."""
        item = self.items[n]
        effects, weights = (self.curvature, self.n_predictions) if draws else (self.first, self.weights)
        ranks, _ = weighted_means(torch.cat([effects[n, layer] for layer in item.rows], 1), weights)

        def joint(layer: int, some: Sequence[int]) -> float:
            return self.joint_curvature(n, layer, [item.rows[layer].index(head) for head in some])

        return HeadSearch(
            dict(zip(item.places, abs(ranks), strict=True)),
            joint,
            largest=largest,
            most=item.n_rows if most is None else most,
            bounded=bool(self.n_predictions.all()),
        )

    def joint_curvature(self, n: int, layer: int, rows: Sequence[int]) -> float:
        """Estimate the divergence if some rows of a layer are changed together, in nats per prediction of all texts."""
        of_draws = self.surprise[n, layer][:, :, rows].sum(2).square().mean(0) / 2
        return float(of_draws.sum() / self.n_predictions.sum())


def estimated_effects(
    model: Any,
    items: Sequence[NamedIntervention],
    texts: Texts,
    parts: Sequence[Part],
    metric: Metric = next_token_loss,
    *,
    draws: int,
    seed: int,
    bar: Any,
    by: By = "head",
) -> Estimates:
    """Estimate the effects of interventions on texts, part by part.

    Args:
        parts: the texts, each part with its own metric.
        bar: a progress bar, which counts forward passes of a text.

    Raises:
        ValueError: user hooks that had no effect on any chosen head; interventions that need several texts; a
            metric or draws that ``result_gradients`` refuses.
    """
    bar.reset(total=len(texts.tokens) * (2 + draws + len(items) / 2) + SLACK)
    places = [(n, layer) for n, item in enumerate(items) for layer in item.rows]
    by_layer = {x: [n for n, layer in places if layer == x] for x in sorted({layer for _, layer in places})}
    positions = [texts.longest] if by == "position" else []
    sizes = {(n, layer): (len(texts.tokens), len(items[n].rows[layer]), *positions) for n, layer in places}
    first, curvature = ({place: _nothing(*size) for place, size in sizes.items()} for _ in range(2))
    surprise = {place: _nothing(draws, *size) for place, size in sizes.items() if by == "head"}
    n_predictions = torch.zeros(len(texts.tokens), dtype=torch.float64, device="cpu")
    separate, changed = dict[int, bool](), dict.fromkeys(range(len(items)), False)
    kinds = {(n, layer): (n, _kind(items[n], layer)) for n, layer in places}
    unknown = None if parts[0].separable else True
    together: dict[tuple[int, Hashable], bool | None] = dict.fromkeys(kinds.values(), unknown)
    for part in parts:
        runs = _differentiated(model, part, [*by_layer], draws, seed)
        bar.update((2 + draws) * len(part.places))
        for group, run in zip(part.texts.groups, runs, strict=True):
            rows, length = part.places[group.rows.cpu()], group.tokens.shape[1]
            n_predictions[rows] = run.n_predictions
            at = (rows, slice(None), slice(length)) if by == "position" else (rows,)
            for layer, acting in by_layer.items():
                received, deltas = _Received(layer, group.tokens, run.before.get(layer), run.z[layer]), list[Tensor]()
                if layer not in separate:
                    separate[layer] = _is_separate(model, received.text(0))
                for n in acting:
                    kind = kinds[n, layer]
                    delta, known = _delta(model, items[n], received, together[kind], skip=separate[layer])
                    acts = bool((delta != 0).any())
                    changed[n] |= acts
                    if acts or known is False:  # what changes nothing does not show how texts are changed together
                        together[kind] = known
                    deltas.append(delta)
                each = _products(run, layer, deltas, [items[n].rows[layer] for n in acting], by)
                for n, products in zip(acting, each, strict=True):
                    first[n, layer][at] = len(part.places) * products[0]
                    if draws:
                        curvature[n, layer][at] = products[1:].square().mean(0) / 2 / run.n_predictions
                    if by == "head":
                        surprise[n, layer][:, rows] = products[1:]
            bar.update(len(items) * len(rows) / 2)
    _check_changes([items[n] for n in changed if not changed[n]])
    return Estimates(items, metric, first, curvature, surprise, n_predictions, together)


class _Received(NamedTuple):
    """What a layer receives in the unmodified run of texts of equal length, and its z."""

    layer: int
    tokens: Int[Tensor, "text pos"]
    before: Any
    z: Tensor

    def text(self, n: int) -> _Received:
        one = slice(n, n + 1)
        before = None if self.before is None else of_texts(self.before, one)
        return _Received(self.layer, self.tokens[one], before, self.z[one])


def _nothing(*size: int) -> Float64[Tensor, "*size"]:
    return torch.full(size, torch.nan, dtype=torch.float64, device="cpu")


def _differentiated(model: Any, part: Part, layers: Sequence[int], draws: int, seed: int) -> list[ResultGradients]:
    """Run and differentiate a part, with labels that depend only on the seed and a text's place in the batch."""
    uniforms = []
    for group in part.texts.groups:
        generators = [np.random.default_rng((seed, int(place))) for place in part.places[group.rows.cpu()]]
        drawn = [generator.random((draws, group.tokens.shape[1])) for generator in generators]
        uniforms.append(torch.as_tensor(np.stack(drawn, 1), device="cpu"))
    groups = [group.tokens for group in part.texts.groups]
    return result_gradients(model, groups, layers, partial(_value, part), uniforms)


def _value(part: Part, outputs: list[Any]) -> Tensor:
    """Compute a metric, averaged over texts, with its graph."""
    value = values_of(part.metric, outputs, part.texts)
    as_numbers(value, len(part.texts.tokens))  # raises for what is not a number or one per text
    if not isinstance(value, Tensor):
        raise ArgumentError("metric", f"must return a tensor to be differentiated, got {shown(value)}")
    return value.double().mean()


def _check_changes(unchanged: Sequence[NamedIntervention]) -> None:
    """Raise if user hooks had no effect on any chosen head."""
    for item in unchanged:
        if not item.divisible:
            raise ArgumentError(
                "interventions",
                f"must change the results of heads, and hooks of your own in {item.name!r} had no effect on any "
                "chosen head",
            )


def _is_separate(model: Any, received: _Received) -> bool:
    """Say whether a layer's z can be computed from the input of its block alone."""
    if has_hooks(model):
        return False
    layer, tokens, before, z = received
    again = attempted(lambda: changed_results(model, tokens, layer, before, []))
    return again is not None and again.shape == z.shape and mismatch(again, z) <= 1


def _kind(item: NamedIntervention, layer: int) -> Hashable:
    """Return what decides how texts are changed together: the package's edits, or the layer for hooks of the user."""
    return frozenset(x.edit for x in item.of(layer).interventions) if item.divisible else layer


def _delta(
    model: Any, item: NamedIntervention, received: _Received, together: bool | None, *, skip: bool
) -> tuple[Tensor, bool | None]:
    """Compute the change of a layer's z under an intervention on each text alone, given what the layer receives.

    This detects interventions that act differently on a batch than on each text alone.

    Args:
        together: whether texts that are run together are changed as each alone; None if that is not known.
        skip: whether z can be computed from the input of the layer's block alone.

    Returns:
        The change, and ``together``, which several texts show.
    """
    if together or len(received.tokens) == 1:
        return wide(_changed(model, item, received, skip=skip)) - wide(received.z), together
    each = [received.text(n) for n in range(len(received.tokens))]
    alone = torch.cat([_changed(model, item, text, skip=skip) for text in each])
    if together is None:
        whole = attempted(lambda: _changed(model, item, received, skip=skip))
        if whole is not None and mismatch(whole, alone) <= 1:
            return wide(whole) - wide(received.z), True
    unmodified = torch.cat([_changed(model, None, text, skip=skip) for text in each])  # rounds as z of each text does
    return wide(alone) - wide(unmodified), False


def _changed(model: Any, item: NamedIntervention | None, received: _Received, *, skip: bool) -> Tensor:
    """Compute a layer's z under an intervention or none, given what the layer receives in the unmodified run."""
    layer, tokens, before, z = received
    name, hooks = ("", []) if item is None else (f"; {item.name!r}", item.in_layer(layer))
    try:
        if item is not None and not (skip or item.divisible):
            raise ArgumentError("interventions", f"must be hooks of this package for {type(model).__name__}")
        new = changed_results(model, tokens, layer, before, hooks, skip=skip)
    except ValueError as error:
        raise ArgumentError(
            "interventions", f"must act on each text alone and change only attention{name}: {error}"
        ) from error
    assert new is not None
    if item is not None and not bool(new.isfinite().all()) and bool(z.isfinite().all()):
        raise ArgumentError(
            "interventions", f"must give finite results, but {item.name!r} gives NaN or infinity in layer {layer}"
        )
    return new


@own_sums()
def _products(
    run: ResultGradients, layer: int, deltas: Sequence[Tensor], rows: Sequence[Sequence[int]], by: By
) -> list[Float64[Tensor, "gradient text row *pos"]]:
    """Sum the products of each gradient and each change of z over components (and positions), for the rows of each."""
    gradients = torch.stack([wide(x) for x in (run.metric[layer], *(of_draw[layer] for of_draw in run.surprise))])
    changes = torch.stack([wide(x) for x in deltas])
    if by == "position":
        products = [(gradients * change).sum(-1, dtype=torch.float64).transpose(2, 3) for change in changes]
    else:
        x, y = (x.double().transpose(2, 3).flatten(3).movedim(0, 2) for x in (gradients, changes))
        products = [*(x @ y.mT).permute(3, 2, 0, 1)]
    return [x[:, :, list(some)].cpu() for x, some in zip(products, rows, strict=True)]


def wide(x: Tensor) -> Tensor:
    """Convert to float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
