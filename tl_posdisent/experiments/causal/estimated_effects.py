"""Estimates of the effect of interventions on every head, from gradients and the changes of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tl_posdisent.experiments.causal.head_search import HeadSearch
from tl_posdisent.experiments.causal.metrics import Metric, as_numbers, is_loss, next_token_loss, values_of
from tl_posdisent.experiments.causal.named_interventions import NamedIntervention
from tl_posdisent.experiments.causal.result_gradients import ResultGradients, result_gradients
from tl_posdisent.experiments.causal.text_parts import TOKENS, Part
from tl_posdisent.models.running.partial_forward import attempted, changed_results, has_hooks, of_texts
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.precision import mismatch, own_sums
from tl_posdisent.utils.statistics import weighted_means
from tl_posdisent.utils.validation import shown

By = Literal["head", "position"]


class Estimates:
    """Estimates for each intervention, layer and head (and position), text by text.

    Attributes:
        first: first-order effects on the metric, for each intervention; with ``by="position"``, a third axis of
            positions, which is NaN after the end of a text.
        curvature: estimates of the divergence of the predictions, in nats per prediction; NaN without draws.
        n_predictions: number of predictions of each text.
    """

    def __init__(
        self,
        model: Any,
        items: Sequence[NamedIntervention],
        lengths: Sequence[int],
        draws: int,
        seed: int,
        bar: Any,
        metric: Metric = next_token_loss,
        by: By = "head",
    ) -> None:
        self.model, self.items, self.draws, self.seed, self.bar = model, items, draws, seed, bar
        self.metric, self.by = metric, by
        self.layers = sorted({layer for item in items for layer in item.rows})
        positions = [max(lengths)] if by == "position" else []
        shape = [{layer: (len(lengths), len(rows), *positions) for layer, rows in item.rows.items()} for item in items]
        self.first, self.curvature = (
            [{layer: _nothing(*size) for layer, size in sizes.items()} for sizes in shape] for _ in range(2)
        )
        kept = shape if by == "head" else []
        self.surprise = [{layer: _nothing(draws, *size) for layer, size in sizes.items()} for sizes in kept]
        self.n_predictions = torch.zeros(len(lengths), dtype=torch.float64, device="cpu")
        self.changed = [False] * len(items)
        self.separate: dict[int, bool] = {}  # by layer, whether z can be computed from the input of its block alone
        # By intervention and layer, whether texts that are run together are changed as each alone.
        self.together: dict[tuple[int, int], bool] = {}

    def add(self, part: Part) -> None:
        """Estimate the effects in some texts."""
        groups = [group.tokens for group in part.texts.groups]
        uniforms = [self._uniforms(part, group.rows.tolist(), group.tokens.shape[1]) for group in part.texts.groups]
        found = result_gradients(self.model, groups, self.layers, lambda outputs: _value(part, outputs), uniforms)
        delta_of = self._delta_of_texts if part.separable else self._delta
        self.bar.update((2 + self.draws) * len(part.places))
        for group, tokens, gradients in zip(part.texts.groups, groups, found, strict=True):
            places = part.places[group.rows.cpu()]
            self.n_predictions[places] = gradients.n_predictions
            for layer in self.layers:
                before, z = gradients.before.get(layer), gradients.z[layer]
                some = [n for n, item in enumerate(self.items) if layer in item.rows]
                deltas = {n: delta_of(n, layer, tokens, before, z) for n in some}
                self._add(layer, deltas, places, gradients, len(part.places))
            self.bar.update(len(self.items) * len(places) / 2)

    @property
    def tokens_at_once(self) -> int:
        """How many tokens of short texts the interventions may change together."""
        return TOKENS if all(self.together.values()) else 1

    def check_changes(self) -> None:
        """Raise if hooks of the user's changed no head."""
        for item, changed in zip(self.items, self.changed, strict=True):
            if not (changed or item.divisible):
                raise ArgumentError(
                    "interventions",
                    f"must change the results of heads, and hooks of your own in {item.name!r} change none of those "
                    "chosen, given what their layer receives",
                )

    @property
    def weights(self) -> Float64[Tensor, " text"]:
        """By which texts are averaged: predictions for the loss, texts for other metrics."""
        return self.n_predictions if is_loss(self.metric) else torch.ones_like(self.n_predictions)

    def search(self, n: int, *, largest: int, most: int | None) -> HeadSearch:
        """Begin the search for the heads with the largest divergences under an intervention, by their estimates."""
        item = self.items[n]
        effects, weights = (self.curvature, self.n_predictions) if self.draws else (self.first, self.weights)
        ranks, _ = weighted_means(torch.cat([*effects[n].values()], 1), weights)

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
        of_draws = self.surprise[n][layer][:, :, rows].sum(2).square().mean(0) / 2
        return float(of_draws.sum() / self.n_predictions.sum())

    def _uniforms(self, part: Part, rows: Sequence[int], length: int) -> Float64[Tensor, "draw text pos"]:
        """Draw uniform numbers that depend on the seed and on the text's place in the batch only."""
        seeds = [(self.seed, int(part.places[row])) for row in rows]
        drawn = [np.random.default_rng(each).random((self.draws, length)) for each in seeds]
        return torch.as_tensor(np.stack(drawn, 1), device="cpu")

    def _delta(self, n: int, layer: int, tokens: Tensor, before: Any, z: Tensor) -> Tensor:
        """Compute the change of a layer's z under an intervention, given what the layer receives."""
        return wide(self._changed(self.items[n], layer, tokens, before, z)) - wide(z)

    def _delta_of_texts(self, n: int, layer: int, tokens: Tensor, before: Any, z: Tensor) -> Tensor:
        """Compute the change under an intervention on each text alone, for all of them at once where that is the same.

        An intervention that needs several texts, or takes only one, is noticed.
        """
        if len(tokens) == 1 or self.together.get((n, layer)):
            return self._delta(n, layer, tokens, before, z)
        texts = [slice(at, at + 1) for at in range(len(tokens))]
        received = [(tokens[x], None if before is None else of_texts(before, x), z[x]) for x in texts]
        alone = torch.cat([self._changed(self.items[n], layer, *own) for own in received])
        if (n, layer) not in self.together:
            whole = attempted(lambda: self._changed(self.items[n], layer, tokens, before, z))
            self.together[n, layer] = whole is not None and mismatch(whole, alone) <= 1
            if whole is not None and self.together[n, layer]:
                return wide(whole) - wide(z)
        # z that rounds as the changed one does
        unmodified = torch.cat([self._changed(None, layer, *own) for own in received])
        return wide(alone) - wide(unmodified)

    def _changed(self, item: NamedIntervention | None, layer: int, tokens: Tensor, before: Any, z: Tensor) -> Tensor:
        """Compute a layer's z, given what the layer receives in the unmodified run, under an intervention or none."""
        if layer not in self.separate:
            again = None
            if not has_hooks(self.model):
                again = attempted(lambda: changed_results(self.model, tokens, layer, before, []))
            self.separate[layer] = again is not None and again.shape == z.shape and mismatch(again, z) <= 1
        hooks = [] if item is None else item.in_layer(layer)
        try:
            if item is not None and not (self.separate[layer] or item.divisible):
                raise ArgumentError("interventions", f"must be hooks of this package for {type(self.model).__name__}")
            new = changed_results(self.model, tokens, layer, before, hooks, skip=self.separate[layer])
        except ValueError as error:
            name = "" if item is None else f"; {item.name!r}"
            raise ArgumentError(
                "interventions", f"must act on each text alone and on its attention{name}: {error}"
            ) from error
        assert new is not None
        if item is not None and not bool(new.isfinite().all()) and bool(z.isfinite().all()):
            raise ArgumentError(
                "interventions", f"must give finite results, but {item.name!r} gives NaN or infinity in layer {layer}"
            )
        return new

    @own_sums()
    def _add(
        self, layer: int, deltas: Mapping[int, Tensor], places: Tensor, run: ResultGradients, n_texts: int
    ) -> None:
        """Add the effects of each intervention's change of z in some texts."""
        gradients = [run.metric[layer], *(surprise[layer] for surprise in run.surprise)]
        for n, products in self._products(layer, gradients, deltas).items():
            self.changed[n] |= bool((deltas[n] != 0).any())
            first, drawn = products[0], products[1:]
            # Of a text that is shorter than the longest, all positions that it has.
            at: tuple[Any, ...] = (places, slice(None), *(slice(size) for size in first.shape[2:]))
            self.first[n][layer][at] = n_texts * first
            if self.draws:
                self.curvature[n][layer][at] = drawn.square().mean(0) / 2 / run.n_predictions
            if self.by == "head":
                self.surprise[n][layer][:, places] = drawn

    def _products(
        self, layer: int, gradients: Sequence[Tensor], deltas: Mapping[int, Tensor]
    ) -> dict[int, Float64[Tensor, "gradient text row *pos"]]:
        """Sum the products of each gradient and each intervention's change over components (and positions)."""
        rows = {n: self.items[n].rows[layer] for n in deltas}
        if self.by == "position":
            return {
                n: torch.stack([_products_by_position(gradient, delta, rows[n]) for gradient in gradients])
                for n, delta in deltas.items()
            }
        found = {}
        for whole in {some == [None] for some in rows.values()}:
            chosen = [n for n in deltas if (rows[n] == [None]) is whole]
            products = _products_by_row(gradients, [deltas[n] for n in chosen], whole=whole)
            for n, of_item in zip(chosen, products, strict=True):
                found[n] = of_item[:, :, [0 if head is None else head for head in rows[n]]]
        return found


def wide(x: Tensor) -> Tensor:
    """Convert to float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _nothing(*size: int) -> Float64[Tensor, "*size"]:
    return torch.full(size, torch.nan, dtype=torch.float64, device="cpu")


def _value(part: Part, outputs: list[Any]) -> Tensor:
    """Compute a metric, averaged over texts, with its graph."""
    value = values_of(part.metric, outputs, part.texts)
    as_numbers(value, len(part.texts.tokens))  # raises for what is not a number or one per text
    if not isinstance(value, Tensor):
        raise ArgumentError("metric", f"must return a tensor to be differentiated, got {shown(value)}")
    return value.double().mean()


def _products_by_row(
    gradients: Sequence[Tensor], deltas: Sequence[Tensor], *, whole: bool
) -> Float64[Tensor, "delta gradient text row"]:
    """Sum the products of each gradient and each change, ``[text, pos, head, d_head]``, over positions and components.

    Rows are heads; with ``whole``, a text is one row, whatever its layout.
    """

    def by_row(vectors: Sequence[Tensor]) -> Float64[Tensor, "text row vector component"]:
        x = torch.stack([vector.double() for vector in vectors])
        return (x.flatten(2)[:, :, None] if whole else x.transpose(2, 3).flatten(3)).movedim(0, 2)

    return (by_row(gradients) @ by_row(deltas).mT).permute(3, 2, 0, 1).cpu()


def _products_by_position(
    gradient: Float[Tensor, "text pos *rest"], delta: Float[Tensor, "text pos *rest"], rows: Sequence[int | None]
) -> Float64[Tensor, "text row pos"]:
    """Sum the products of a gradient and a change over components, for each row and position."""
    products = wide(gradient) * delta
    if rows == [None]:
        return products.flatten(2).double().sum(2)[:, None].cpu()
    return products.double().sum(3)[:, :, rows].transpose(1, 2).cpu()
