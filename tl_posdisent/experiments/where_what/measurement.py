"""Divergences of texts under each replacement of heads: estimated for all, measured by runs for some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from jaxtyping import Float64
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
    """Which heads are run: those asked for, and as many of the largest contribution as have a share of the sum.

    Attributes:
        most: how many at most, those asked for not counted.
        share: of the sum of the estimated contributions, at which there are enough.
        asked: indices of others.
    """

    most: int
    share: float
    asked: list[int]

    def choose(self, contributions: Float64[Tensor, " head"]) -> list[int]:
        """Return the indices of the heads that are run."""
        order = contributions.nan_to_num().argsort(descending=True, stable=True)
        before = contributions.nan_to_num()[order].cumsum(0).roll(1) / contributions.nansum()
        before[:1] = 0.0
        enough = order[: self.most][before[: self.most] < self.share]
        return sorted({*enough.tolist(), *self.asked})


def heads_to_run(reading: ModelReading, pairs: Sequence[Head], exact: Exact) -> HeadsToRun:
    """Read ``exact``; raise for heads that are not among the chosen ones."""
    if isinstance(exact, str) and exact in ("half", "all"):
        return HeadsToRun(_MOST, _HALF, []) if exact == "half" else HeadsToRun(0, 1.0, [*range(len(pairs))])
    if is_integer(exact):
        return HeadsToRun(min(check_integer("exact", exact, 0), len(pairs)), float("inf"), [])
    with naming(heads="exact"):
        asked = pairs_of(any_heads(reading, None, exact))
    if missing := [head_label(*pair) for pair in asked if pair not in pairs]:
        raise ArgumentError("exact", f"must lie within the chosen heads, got {missing[0]}")
    return HeadsToRun(0, 1.0, [pairs.index(pair) for pair in asked])


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
