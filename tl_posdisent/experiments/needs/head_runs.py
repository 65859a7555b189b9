"""Runs of texts with one head replaced: what each replacement costs at each predicted token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.experiments.causal.estimated_effects import InterventionHead, LayerIntervention, separate_layers
from tl_posdisent.experiments.causal.exact_effects import intervention_runs
from tl_posdisent.experiments.causal.text_parts import RUN_TOKENS, parts_of
from tl_posdisent.experiments.measuring.metrics import next_token_loss
from tl_posdisent.experiments.measuring.token_losses import ByToken, Unmodified
from tl_posdisent.experiments.needs.replacements import CONSTANTS, Fold
from tl_posdisent.experiments.needs.sentences import Cost
from tl_posdisent.experiments.needs.shares import NEGLIGIBLE, shares, verdicts
from tl_posdisent.hooks.hook_list import Chosen
from tl_posdisent.utils.statistics import weighted_means


@dataclass(frozen=True, eq=False)
class HeadRuns:
    """What each of the ``replacements`` of a head costs at each predicted token of each text, in nats.

    Attributes:
        divergences: KL(unmodified ‖ replaced) at each position but the last, by text.
        losses: change of the loss of the next token, by text.
    """

    divergences: list[Float64[Tensor, "replacement _predicted"]]
    losses: list[Float64[Tensor, "replacement _predicted"]]

    @property
    def n_predictions(self) -> Float64[Tensor, " text"]:
        """The number of predicted tokens of each text."""
        return torch.tensor([x.shape[1] for x in self.divergences], dtype=torch.float64)

    def needs(self, layer: int, head: int) -> pd.DataFrame:
        """Return the head's row of the table of ``where_or_what``."""
        contribution, distance, uniform, *content = _means(self.divergences)[..., None]
        row = shares(contribution, distance, uniform, torch.stack(content), self.n_predictions, CONSTANTS)
        row["exact"] = True
        row["verdict"] = verdicts(row, self.n_predictions, NEGLIGIBLE)
        row.insert(0, "layer", layer)
        row.insert(1, "head", head)
        return row

    def costs(self) -> tuple[Cost, ...]:
        """Return what it costs to put every other key at each of ``CONSTANTS``."""
        (contribution, _, _, *kl), (_, _, _, *losses) = _means(self.divergences), _means(self.losses)
        costs = []
        for distance, of_kl, of_losses in zip(CONSTANTS, kl, losses, strict=True):
            measured = torch.stack([of_kl, of_losses, of_kl - contribution], 1)
            means, errors = weighted_means(measured, self.n_predictions)
            (own, loss, excess), (own_se, loss_se, excess_se) = means.tolist(), errors.tolist()
            costs.append(Cost(float(distance), own, own_se, loss, loss_se, excess, excess_se))
        return tuple(costs)

    def largest(self) -> tuple[int, int]:
        """Find the text and the position where the head contributes most, but for first positions, with one key."""
        later = [x[0, 1:] for x in self.divergences]
        text = max(range(len(later)), key=lambda row: float(later[row].max()) if len(later[row]) else -1.0)
        return text, 1 + int(later[text].argmax()) if len(later[text]) else 1

    def contribution_at(self, text: int, position: int) -> float | None:
        """Return the divergence under the mean output at one position; None at the last, which predicts nothing."""
        divergences = self.divergences[text][0]
        return divergences[position].item() if position < len(divergences) else None


def _means(by_text: Sequence[Float64[Tensor, "replacement _predicted"]]) -> Float64[Tensor, "replacement text"]:
    return torch.stack([x.mean(1) for x in by_text], 1)


def measure_head(model: Any, of_folds: Sequence[Fold], chosen: Chosen, bar: Any) -> HeadRuns:
    """Run all texts under each replacement of one chosen head."""
    changes = [separate_layers(fold.replacements, chosen) for fold in of_folds]
    costs = run_heads(model, of_folds, changes, bar)
    by_text = [*zip(*costs.values(), strict=True)]
    return HeadRuns(
        [torch.stack([x.divergences for x in text]) for text in by_text],
        [torch.stack([x.losses for x in text]) for text in by_text],
    )


@torch.no_grad()
def run_heads(
    model: Any, of_folds: Sequence[Fold], changes: Sequence[Sequence[LayerIntervention]], bar: Any
) -> dict[InterventionHead, list[ByToken]]:
    """Run all texts under replacements of heads, one head at a time.

    Args:
        of_folds: the measured texts.
        changes: for each fold, replacements of single heads, fitted to the other texts.
        bar: a progress bar, which counts runs of a text.

    Returns:
        For the name of each replacement, its layer and head: the changes of the losses and the divergences of each
        text.

    Raises:
        ValueError: a model that returns no logits of next tokens.
    """
    costs: dict[InterventionHead, dict[int, ByToken]] = {}
    for fold, of_fold in zip(of_folds, changes, strict=True):
        parts = parts_of(fold.texts, next_token_loss, tokens=RUN_TOKENS)
        for part, clean, changed_runs in intervention_runs(model, of_fold, parts):
            unmodified, rows = Unmodified.of(clean, part.texts), [fold.rows[place] for place in part.places.tolist()]
            for changed, run in changed_runs:
                found, (head,) = unmodified.compare(run()), changed.heads
                losses, divergences = (
                    x.cpu().chunk(len(rows)) for x in (found.losses - unmodified.losses, found.divergences)
                )
                by_row = costs.setdefault((changed.name, changed.layer, head), {})
                by_row.update(zip(rows, map(ByToken, losses, divergences), strict=True))
                bar.update(len(rows))
    return {replaced: [by_row[row] for row in sorted(by_row)] for replaced, by_row in costs.items()}
