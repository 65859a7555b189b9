"""Exact effects of interventions on some heads, one run each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.experiments.causal.metrics import (
    as_numbers,
    divergences,
    losses_and_divergences,
    next_token_loss,
    values_of,
)
from tl_posdisent.experiments.causal.named_interventions import NamedIntervention
from tl_posdisent.experiments.causal.result_gradients import predictions
from tl_posdisent.experiments.causal.runs import Change, Runs
from tl_posdisent.experiments.causal.text_parts import Part
from tl_posdisent.models.partial_forward import changed_results
from tl_posdisent.models.reading.forward_pass import Hook
from tl_posdisent.models.reading.model_parts import hook_name

Place = tuple[int, int, int | None]
"""Number of an intervention, layer and head."""


class ExactEffects:
    """Effects on a metric, and divergences from the unmodified predictions, of chosen interventions on single heads.

    Attributes:
        effects: by place, the change of the metric in each text, or in all texts together.
        divergences: by place, KL(unmodified ‖ changed) of each text, in nats per prediction; NaN without predictions.
    """

    def __init__(
        self, model: Any, items: Sequence[NamedIntervention], n_texts: int, places: Sequence[Place], bar: Any
    ) -> None:
        self.model, self.items, self.bar = model, items, bar
        self.by_layer: dict[int, list[Place]] = {}
        for place in sorted(places, key=lambda place: (place[1], place[0])):
            self.by_layer.setdefault(place[1], []).append(place)
        self.effects, self.divergences = (
            {place: torch.full((n_texts,), torch.nan, dtype=torch.float64, device="cpu") for place in places}
            for _ in range(2)
        )

    @property
    def n_passes(self) -> float:
        """Number of forward passes of each text: one per layer from the changed one on, and the unmodified run."""
        n = len(self.model.blocks)
        return sum(len(places) * (n - layer) / n for layer, places in self.by_layer.items()) + bool(self.by_layer)

    def add(self, part: Part) -> None:
        """Run some texts with each of the chosen heads changed."""
        if not self.by_layer:
            return
        texts = part.texts
        runs = Runs(self.model, texts, list(self.by_layer))
        self.bar.update(len(part.places))
        baseline = as_numbers(values_of(part.metric, runs.clean, texts), len(texts.tokens))
        clean = [predictions(output, group.tokens) for output, group in zip(runs.clean, texts.groups, strict=True)]
        for layer, places in self.by_layer.items():
            share = 1 - layer / len(self.model.blocks)
            changes = {n: self._change(part, runs, n, layer) for n in dict.fromkeys(place[0] for place in places)}
            every = [*range(self.model.cfg.n_heads)]
            each = runs.each(layer, [(every if head is None else [head], changes[n]) for n, _, head in places])
            for place, run in zip(places, each, strict=True):
                values, kl = _measured(run(), clean, part)
                self.effects[place][part.places] = values - baseline
                self.divergences[place][part.places] = kl
                self.bar.update(share * len(part.places))

    def _change(self, part: Part, runs: Runs, n: int, layer: int) -> Change:
        """Return the hooks of an intervention; if it has none of one head, hooks that write the changed z of a head."""
        item = self.items[n]
        if item.divisible:
            return Change(partial(_of_item, item, layer), item.name)
        changed = [
            changed_results(self.model, group.tokens, layer, before, item.hooks)
            for group, before in zip(part.texts.groups, runs.before(layer), strict=True)
        ]

        def write(group: int, heads: Sequence[int], z: Tensor, hook: Any) -> Tensor:
            new = changed[group]
            assert new is not None
            at = torch.tensor(heads, device=z.device)
            return z.index_copy(2, at, new[:, :, at].to(z))

        return Change(lambda group, heads: [(hook_name(layer, "hook_z"), partial(write, group, list(heads)))])


def _of_item(item: NamedIntervention, layer: int, group: int, heads: Sequence[int]) -> list[Hook]:
    return item.of(layer, heads)


def _measured(
    outputs: Sequence[Any], clean: Sequence[Tensor | None], part: Part
) -> tuple[Float64[Tensor, "*text"], Float64[Tensor, "text"]]:
    """Compute a run's metric, and each text's mean divergence from the clean predictions, in the order of the texts."""
    texts = part.texts
    if part.metric is next_token_loss:  # its texts have one length: log-probabilities serve both
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
