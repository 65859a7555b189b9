"""Divergences of texts under each replacement of heads: estimated for all, measured by runs for some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from jaxtyping import Float64, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.experiments.measuring.curvature import curvature
from tl_posdisent.experiments.measuring.part_runs import Head
from tl_posdisent.experiments.measuring.run_changes import Item, run_changes
from tl_posdisent.experiments.where_what.corrections import bands
from tl_posdisent.experiments.where_what.replacements import MEAN, ByReplacement, Fold, over_folds
from tl_posdisent.hooks.hook_list import any_heads, pairs_of
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.running.partial_forward import BlockFacts
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.labels import is_label
from tl_posdisent.utils.validation import check_integer, head_label, is_integer, shown

Exact = int | Literal["half", "all"] | Sequence[tuple[int, int] | str]
"""How many heads of the largest contribution are run, or which."""
_MOST: Final = 24  # heads that are run unless more are asked for
_HALF: Final = 0.5  # of the sum of contributions


@dataclass(frozen=True, eq=False)
class HeadsToRun:
    """Which heads are run: those of the largest contribution, or those asked for.

    Attributes:
        most: how many at most.
        asked: their indices; None for those of the largest contribution.
        half: whether fewer are enough, which have half of the sum of the estimated contributions, and one in each band
            of the model's depth, by which estimates there are corrected.
    """

    most: int
    asked: list[int] | None = None
    half: bool = False

    def choose(self, contributions: Float64[Tensor, " head"], band: Int[Tensor, " head"]) -> list[int]:
        """Return the indices of the heads that are run."""
        if self.asked is not None:
            return self.asked
        sizes = contributions.nan_to_num()
        order = sizes.argsort(descending=True, stable=True)
        if not self.half:
            return sorted(order[: self.most].tolist())
        of_others = [order[band[order] == one][:1] for one in band.unique()]
        n = self.most - len(of_others)
        before = sizes[order].cumsum(0) - sizes[order]
        enough = order[:n][before[:n] < _HALF * sizes.sum()]
        missing = [first for first, one in zip(of_others, band.unique(), strict=True) if one not in band[enough]]
        return sorted(torch.cat([enough, *missing]).tolist())


def heads_to_run(reading: ModelReading, pairs: Sequence[Head], exact: Exact) -> HeadsToRun:
    """Read ``exact``; raise for heads that are not among the chosen ones."""
    if isinstance(exact, str) and exact in ("half", "all"):
        most = min(_MOST, len(pairs))
        return HeadsToRun(most, half=True) if exact == "half" else HeadsToRun(len(pairs))
    if is_integer(exact):
        return HeadsToRun(min(check_integer("exact", exact, 0), len(pairs)))
    if not isinstance(exact, Iterable) or (isinstance(exact, str) and not is_label(exact)):
        raise ArgumentError(
            "exact", f"must be 'half', 'all', a number of heads, or heads such as 'L16H0', got {shown(exact)}"
        )
    with naming(heads="exact"):
        asked = pairs_of(any_heads(reading, None, exact))
    if missing := [head_label(*pair) for pair in asked if pair not in pairs]:
        raise ArgumentError("exact", f"must lie within the chosen heads, got {missing[0]}")
    return HeadsToRun(len(asked), sorted(pairs.index(pair) for pair in asked))


@dataclass(frozen=True, eq=False)
class ModelToMeasure:
    """A model to measure, and what short passes show about it."""

    reading: ModelReading
    folds: Sequence[Fold]
    facts: BlockFacts


@dataclass(frozen=True, eq=False)
class HeadRuns:
    """Divergences of heads of one model, nats per prediction, ``[text, head]``.

    Attributes:
        estimated: of all heads.
        measured: of the heads that were run.
    """

    estimated: ByReplacement
    measured: ByReplacement


def measure(
    subjects: Sequence[ModelToMeasure],
    pairs: Sequence[Head],
    to_run: HeadsToRun,
    *,
    draws: int,
    seed: int,
    progress: bool,
) -> tuple[list[HeadRuns], list[int], Float64[Tensor, " text"]]:
    """Estimate all heads with the same draws in each model, and run those that are to be run in one of them in all.

    Returns:
        The divergences of each model; the heads that were run, as places among ``pairs``; the number of predictions of
        each text.
    """
    n_texts = sum(len(fold.rows) for subject in subjects for fold in subject.folds)
    n_replacements, band = len(subjects[0].folds[0].replacements), bands(pairs, subjects[0].reading.n_layers)
    n_most = min(len(subjects) * to_run.most, len(pairs)) if to_run.asked is None else to_run.most
    with cost_bar(n_texts, draws, n_replacements, n_most, progress=progress) as bar:
        found = [_estimate(x, pairs, draws=draws, seed=seed, bar=bar) for x in subjects]
        n_predictions = found[0][1]
        places = sorted({n for estimated, _ in found for n in to_run.choose(n_predictions @ estimated[MEAN], band)})
        bar.total -= n_texts * n_replacements * (n_most - len(places))
        run = [pairs[n] for n in places]
        measured = [run_heads(x, run, bar=bar)[0] for x in subjects]
    runs = [HeadRuns(estimated, own) for (estimated, _), own in zip(found, measured, strict=True)]
    return runs, places, n_predictions


def _estimate(
    subject: ModelToMeasure, pairs: Sequence[Head], *, draws: int, seed: int, bar: Any
) -> tuple[ByReplacement, Float64[Tensor, " text"]]:
    """Estimate the divergence of each text under each replacement of each head, and count its predictions."""
    options: Any = {"seed": seed, "by_position": True, "facts": subject.facts, "bar": bar}
    estimates = []
    for fold in subject.folds:
        heads = dict.fromkeys(fold.replacements, pairs)
        estimates.append(curvature(subject.reading, fold.texts, fold.replacements, heads, draws, **options))
    counted = over_folds(subject.folds, [{"": x.predictions[None]} for x in estimates])[""][:, 0]
    return over_folds(subject.folds, [x.curvature for x in estimates]), counted


def run_heads(
    subject: ModelToMeasure, items: Sequence[Item], *, bar: Any
) -> tuple[ByReplacement, Float64[Tensor, " text"]]:
    """Measure the divergence of each text by runs, each of one replacement of a head, or of some heads together."""
    options: Any = {"facts": subject.facts, "bar": bar}
    found = [run_changes(subject.reading, x.texts, x.replacements, items, **options).checked() for x in subject.folds]
    counted = over_folds(subject.folds, [{"": x.predictions[None]} for x in found])[""][:, 0]
    return over_folds(subject.folds, [x.by_change for x in found]), counted


def cost_bar(n_texts: int, draws: int | None, n_replacements: int, n_runs: int, *, progress: bool) -> Any:
    """Return a bar of all passes and runs of a text: the cost, before it begins.

    Args:
        draws: of the estimates; None without estimates.
        n_runs: number of heads or groups that are run, at most.
    """
    estimates = 0 if draws is None else 1 + draws + n_replacements
    return tqdm(total=n_texts * (estimates + n_runs * n_replacements), desc="passes and runs", disable=not progress)
