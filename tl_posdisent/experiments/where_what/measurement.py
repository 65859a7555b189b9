"""Divergences of texts under each replacement of heads: estimated for all, measured by runs for some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from jaxtyping import Float64, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.experiments.measuring.curvature import curvature
from tl_posdisent.experiments.measuring.part_runs import Head
from tl_posdisent.experiments.measuring.run_changes import Item, run_changes
from tl_posdisent.experiments.where_what.replacements import ByReplacement, Fold, over_folds
from tl_posdisent.hooks.hook_list import any_heads, pairs_of
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.running.partial_forward import BlockFacts
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.validation import check_integer, head_label, is_integer

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
    with naming(heads="exact"):
        asked = pairs_of(any_heads(reading, None, exact))
    if missing := [head_label(*pair) for pair in asked if pair not in pairs]:
        raise ArgumentError("exact", f"must lie within the chosen heads, got {missing[0]}")
    return HeadsToRun(len(asked), sorted(pairs.index(pair) for pair in asked))


def estimate(
    reading: ModelReading,
    folds: Sequence[Fold],
    pairs: Sequence[Head],
    *,
    draws: int,
    seed: int,
    facts: BlockFacts,
    bar: Any,
) -> tuple[ByReplacement, Float64[Tensor, " text"]]:
    """Estimate the divergence of each text under each replacement of each head, and count its predictions."""
    estimates = []
    for fold in folds:
        heads = dict.fromkeys(fold.replacements, pairs)
        options: Any = {"seed": seed, "by_position": True, "facts": facts, "bar": bar}
        estimates.append(curvature(reading, fold.texts, fold.replacements, heads, draws, **options))
    counted = over_folds(folds, [{"": x.predictions[None]} for x in estimates])[""][:, 0]
    return over_folds(folds, [x.curvature for x in estimates]), counted


def run_heads(
    reading: ModelReading, folds: Sequence[Fold], items: Sequence[Item], *, facts: BlockFacts, bar: Any
) -> tuple[ByReplacement, Float64[Tensor, " text"]]:
    """Measure the divergence of each text by runs, each of one replacement of a head, or of some heads together."""
    found = [run_changes(reading, x.texts, x.replacements, items, facts=facts, bar=bar).checked() for x in folds]
    counted = over_folds(folds, [{"": x.predictions[None]} for x in found])[""][:, 0]
    return over_folds(folds, [x.by_change for x in found]), counted


def cost_bar(n_texts: int, draws: int | None, n_replacements: int, n_runs: int, *, progress: bool) -> Any:
    """Return a bar of all passes and runs of a text: the cost, before it begins.

    Args:
        draws: of the estimates; None without estimates.
        n_runs: number of heads or groups that are run, at most.
    """
    estimates = 0 if draws is None else 1 + draws + n_replacements
    return tqdm(total=n_texts * (estimates + n_runs * n_replacements), desc="passes and runs", disable=not progress)
