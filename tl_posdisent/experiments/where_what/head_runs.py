"""Runs of texts with one head replaced: what each replacement costs at each predicted token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.experiments.measuring.part_runs import Head
from tl_posdisent.experiments.measuring.run_changes import run_changes
from tl_posdisent.experiments.measuring.token_losses import by_token
from tl_posdisent.experiments.where_what.replacements import CONSTANTS, MEAN, Fold, content_alone, over_folds
from tl_posdisent.experiments.where_what.rows import from_runs, table_of
from tl_posdisent.experiments.where_what.sentences import Cost
from tl_posdisent.experiments.where_what.verdicts import NEGLIGIBLE
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.utils.statistics import mean


@dataclass(frozen=True, eq=False)
class HeadRuns:
    """What each of the ``replacements`` of a head costs at each predicted token of each text, in nats.

    Attributes:
        head: layer and head.
        divergences: KL(unmodified ‖ replaced) at each position but the last, by replacement; NaN after a text.
        losses: change of the loss of the next token, by replacement.
    """

    head: Head
    divergences: dict[str, Float64[Tensor, "text predicted"]]
    losses: dict[str, Float64[Tensor, "text predicted"]]

    @property
    def n_predictions(self) -> Float64[Tensor, " text"]:
        """The number of predicted tokens of each text."""
        return (~self.divergences[MEAN].isnan()).sum(1).double()

    def needs(self) -> pd.DataFrame:
        """Return the head's row of the table of ``where_or_what``."""
        index = pd.DataFrame([self.head], columns=["layer", "head"])
        by_text = {name: x.nanmean(1)[:, None] for name, x in self.divergences.items()}
        return table_of(index, from_runs(by_text, self.n_predictions), NEGLIGIBLE)

    def costs(self) -> tuple[Cost, ...]:
        """Return what it costs to put every other key at each of ``CONSTANTS``."""
        costs = []
        for distance in CONSTANTS:
            kl, loss = (x[content_alone(distance)].nanmean(1) for x in (self.divergences, self.losses))
            measured = (mean(x, self.n_predictions) for x in (kl, loss))
            costs.append(Cost(float(distance), *(number.item() for estimate in measured for number in estimate)))
        return tuple(costs)

    def largest(self) -> tuple[int, int]:
        """Find the text and the position where the head contributes most, but for first positions, with one key."""
        later = self.divergences[MEAN][:, 1:].nan_to_num(nan=-1.0)
        if not later.shape[1]:
            return 0, 1
        text = int(later.amax(1).argmax())
        return text, 1 + int(later[text].argmax())

    def contribution_at(self, text: int, position: int) -> float | None:
        """Return the divergence under the mean output at one position; None at the last, which predicts nothing."""
        divergences = self.divergences[MEAN][text]
        return divergences[position].item() if position < self.n_predictions[text] else None


def measure_head(reading: ModelReading, folds: Sequence[Fold], head: Head, bar: Any) -> HeadRuns:
    """Run all texts under each replacement of one head.

    Args:
        folds: the measured texts.
        bar: a progress bar, which counts runs of a text.

    Raises:
        ValueError: a model that returns no logits of next tokens.
    """
    added = []
    for fold in folds:
        found = run_changes(reading, fold.texts, fold.replacements, [head], by_token, bar=bar).checked()
        unmodified = found.unmodified * torch.tensor([1.0, 0.0])  # divergences from it are 0 up to rounding
        added.append({name: found[name] - unmodified for name in fold.replacements})
    by_replacement = over_folds(folds, added)
    losses, divergences = ({name: x[:, 0, :, n] for name, x in by_replacement.items()} for n in (0, 1))
    return HeadRuns(head, divergences, losses)
