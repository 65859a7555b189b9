"""Runs of texts with one head replaced: what each replacement costs at each predicted token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.experiments.causal.text_parts import RUN_TOKENS, parts_of
from tl_posdisent.experiments.measuring.metrics import next_token_loss
from tl_posdisent.experiments.measuring.runs import run_under
from tl_posdisent.experiments.measuring.token_losses import as_log_probabilities, losses_and_divergences
from tl_posdisent.experiments.needs.replacements import CONSTANTS, DISTANCE, MEAN, UNIFORM, Fold, content_alone
from tl_posdisent.experiments.needs.sentences import Cost
from tl_posdisent.experiments.needs.shares import NEGLIGIBLE, shares, verdicts
from tl_posdisent.hooks.hook_list import Chosen, Hooks, pairs_of
from tl_posdisent.hooks.positions import dummy_distance
from tl_posdisent.utils.statistics import weighted_means

DISTANCES: Final = (0, 1, 5, 32)
"""Distances at which every key is put, in positions, to measure the harm of wrong attention."""


@dataclass(frozen=True, eq=False)
class HeadRuns:
    """What each replacement of a head costs at each predicted token of each text, in nats.

    Attributes:
        names: of the replacements.
        divergences: KL(unmodified ‖ replaced) at each position but the last, by text.
        losses: change of the loss of the next token, by text.
    """

    names: tuple[str, ...]
    divergences: list[Float64[Tensor, "replacement predicted"]]
    losses: list[Float64[Tensor, "replacement predicted"]]

    @property
    def n_predictions(self) -> Float64[Tensor, " text"]:
        """The number of predicted tokens of each text."""
        return torch.tensor([x.shape[1] for x in self.divergences], dtype=torch.float64, device="cpu")

    def needs(self, layer: int, head: int) -> pd.DataFrame:
        """Return the head's row of the table of ``where_or_what``."""
        means = _means(self.divergences)
        names = (MEAN, DISTANCE, UNIFORM, *map(content_alone, CONSTANTS))
        contribution, distance, uniform, *content = (means[self.names.index(name)][:, None] for name in names)
        row = shares(contribution, distance, uniform, torch.stack(content), self.n_predictions, CONSTANTS)
        row["exact"] = True
        row["verdict"] = verdicts(row, self.n_predictions, NEGLIGIBLE)
        row.insert(0, "layer", layer)
        row.insert(1, "head", head)
        return row

    def costs(self) -> tuple[Cost, ...]:
        """Return what it costs to put every key at each of ``DISTANCES``."""
        kl, losses = _means(self.divergences), _means(self.losses)
        contribution = kl[self.names.index(MEAN)]
        costs = []
        for distance in DISTANCES:
            n = self.names.index(_every_key_at(distance))
            measured = torch.stack([kl[n], losses[n], kl[n] - contribution], 1)
            means, errors = weighted_means(measured, self.n_predictions)
            (own, loss, excess), (own_se, loss_se, excess_se) = means.tolist(), errors.tolist()
            costs.append(Cost(float(distance), own, own_se, loss, loss_se, excess, excess_se))
        return tuple(costs)

    def largest(self) -> tuple[int, int]:
        """Find the text and the position where the head contributes most, but for first positions, with one key."""
        n = self.names.index(MEAN)
        later = [x[n, 1:] for x in self.divergences]
        text = max(range(len(later)), key=lambda row: float(later[row].max()) if len(later[row]) else -1.0)
        return text, 1 + int(later[text].argmax()) if len(later[text]) else 1

    def contribution_at(self, text: int, position: int) -> float | None:
        """Return the divergence under the mean output at one position; None at the last, which predicts nothing."""
        divergences = self.divergences[text][self.names.index(MEAN)]
        return divergences[position].item() if position < len(divergences) else None


def _every_key_at(distance: float) -> str:
    return f"every key at distance {distance:g}"


def _means(by_text: Sequence[Float64[Tensor, "replacement predicted"]]) -> Float64[Tensor, "replacement text"]:
    return torch.stack([x.mean(1) for x in by_text], 1)


@torch.no_grad()
def run_replacements(model: Any, of_folds: Sequence[Fold], chosen: Chosen, bar: Any) -> HeadRuns:
    """Run all texts unmodified, and under each replacement of a head; a full pass each.

    Args:
        of_folds: the measured texts, with the replacements of the head.
        chosen: the head.
        bar: a progress bar, which counts runs of a text.

    Raises:
        ValueError: a model that returns no logits of next tokens.
    """
    constants: dict[str, Hooks] = {
        _every_key_at(d): dummy_distance(model, d, heads=pairs_of(chosen)) for d in DISTANCES
    }
    names = tuple(of_folds[0].replacements | constants)
    by_row: dict[int, tuple[Tensor, Tensor]] = {}
    for fold in of_folds:
        hooks = (fold.replacements | constants).values()
        for part in parts_of(fold.texts, next_token_loss, tokens=RUN_TOKENS):
            (group,) = part.texts.groups
            tokens = group.tokens
            output = run_under(model, tokens, [])
            clean = as_log_probabilities(output)
            unmodified, _ = losses_and_divergences(output, tokens, clean)
            bar.update(len(tokens))
            divergences, losses = list[Tensor](), list[Tensor]()
            for replacement in hooks:
                replaced, kl = losses_and_divergences(run_under(model, tokens, replacement), tokens, clean)
                divergences.append(kl.double().cpu())
                losses.append((replaced - unmodified).double().cpu())
                bar.update(len(tokens))
            for n, place in enumerate(part.places.tolist()):
                by_row[fold.rows[place]] = torch.stack(divergences)[:, n], torch.stack(losses)[:, n]
    ordered = [by_row[row] for row in sorted(by_row)]
    return HeadRuns(names, [kl for kl, _ in ordered], [losses for _, losses in ordered])
