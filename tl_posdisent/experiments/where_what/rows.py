"""The quantities of each head from its divergences, with errors: what a row of ``where_or_what`` has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Final

import pandas as pd
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from tl_posdisent.experiments.measuring.part_runs import Head
from tl_posdisent.experiments.where_what.corrections import bands, from_others, log_ratios, spread_of_ratios
from tl_posdisent.experiments.where_what.parts import PARTS, Values, content_distances, divide, kept_shares
from tl_posdisent.experiments.where_what.replacements import MEAN, ByReplacement
from tl_posdisent.experiments.where_what.verdicts import verdicts
from tl_posdisent.utils.statistics import Estimate, degrees_of_freedom, false_discovery_rates, jackknife, significance
from tl_posdisent.utils.tables import with_ends

SHARES: Final = ("kept_distance", "kept_content", "kept_uniform", "gate")
COLUMNS: Final = ("contribution", *PARTS, "joint", "difference", *SHARES)


@dataclass(frozen=True, eq=False)
class Measured:
    """What heads, or groups, contribute and keep.

    Attributes:
        values: each of ``COLUMNS``, ``[1 + text, head]``: of all texts, then without each of them.
        n_predictions: number of predictions of each text.
        run: which heads were run; others are estimates, corrected by these.
        content_distance: the distance of other keys at which each head keeps most.
        off: standard error of the estimate of each head, by column; of ``contribution``, relative. NaN if not known.
        ratios: measured over estimated contribution; NaN of heads that were not run.
    """

    values: Values
    n_predictions: Float64[Tensor, " text"]
    run: Bool[Tensor, " head"]
    content_distance: list[int]
    off: dict[str, Float64[Tensor, " head"]]
    ratios: Float64[Tensor, " head"]

    def estimate(self, column: str) -> Estimate:
        """Return a quantity of each head and its standard error, that of the estimates included where it is known."""
        value, error = jackknife(self.values[column], self.n_predictions)
        return Estimate(value, (error.square() + self._squares_off(column)).sqrt())

    def _squares_off(self, column: str) -> Float64[Tensor, " head"]:
        """Return the squared error of estimates; 0 of heads that were run, and where it is not known."""
        if column not in self.off:
            return torch.zeros_like(self.values[column][0])
        size = self.values[column][0] if column == "contribution" else 1.0
        return torch.where(self.run, 0.0, (self.off[column] * size).square().nan_to_num())

    def part_of_sum(self, part: str) -> Estimate:
        """Return a part of the sum of all contributions, and its error; estimates are independently off."""
        contribution, values = self.values["contribution"].nan_to_num(), self.values[part].nan_to_num()
        total = contribution.sum(1)
        value, error = jackknife((contribution * values).sum(1) / total, self.n_predictions)
        of_part = contribution[0].square() * self._squares_off(part)
        of_size = (values[0] - value).square() * self._squares_off("contribution")
        return Estimate(value, (error.square() + (of_part + of_size).sum() / total[0].square()).sqrt())

    def parts_of_sum(self) -> dict[str, float]:
        """Return the parts of the sum of all contributions, each with its error ``…_se``."""
        found = {name: self.part_of_sum(name) for name in PARTS}
        return {
            key: x.item() for name, part in found.items() for key, x in zip((name, f"{name}_se"), part, strict=True)
        }


def from_runs(divergences: ByReplacement, n_predictions: Float64[Tensor, " text"]) -> Measured:
    """Compute the quantities of heads, or groups, that were all run.

    Args:
        divergences: nats per prediction, ``[text, head]``.
    """
    n_heads = divergences[MEAN].shape[1]
    run, ratios = torch.ones(n_heads, dtype=torch.bool), torch.full((n_heads,), nan, dtype=torch.float64)
    distances = content_distances(divergences, n_predictions)
    return Measured(_values(divergences, n_predictions), n_predictions, run, distances, {}, ratios)


def from_estimates(
    pairs: Sequence[Head],
    n_layers: int,
    estimated: ByReplacement,
    measured: ByReplacement,
    places: Sequence[int],
    n_predictions: Float64[Tensor, " text"],
) -> Measured:
    """Compute the quantities of heads of which some were run, and correct the estimates of others by these.

    Args:
        pairs: all heads.
        n_layers: of the model.
        estimated: divergences of all heads, nats per prediction, ``[text, head]``.
        measured: those of the heads that were run, at these ``places`` among all.
    """
    run = torch.zeros(len(pairs), dtype=torch.bool)
    run[list(places)] = True
    combined = {name: x.clone() for name, x in estimated.items()}
    for name, x in combined.items():
        x[:, run] = measured[name]
    estimates, values = (_values(x, n_predictions) for x in (estimated, combined))
    off, band = {}, bands(pairs, n_layers)
    for name in COLUMNS[1:]:
        both = (_within(name, x[name][0]) for x in (estimates, values))
        squares = torch.sub(*both).square()
        off[name] = from_others(squares, band, run & ~squares.isnan()).sqrt()
    known = torch.where(run, values["contribution"][0], torch.nan)
    logs = log_ratios(estimates["contribution"][0], known)
    off["contribution"] = spread_of_ratios(logs, band)
    factors = torch.where(run, 1.0, from_others(logs, band, ~logs.isnan()).exp().nan_to_num(1.0))
    values["contribution"] = values["contribution"] * factors
    return Measured(values, n_predictions, run, content_distances(combined, n_predictions), off, logs.exp())


def _within(name: str, value: Float64[Tensor, " head"]) -> Float64[Tensor, " head"]:
    """Clip shares of a contribution to [0, 1]: how far estimates of harm are off is another question."""
    return value.clamp(0, 1) if name in SHARES else value


def _values(divergences: ByReplacement, n_predictions: Float64[Tensor, " text"]) -> Values:
    kept = kept_shares(divergences, n_predictions)
    return kept | divide(kept, n_predictions)


def table_of(index: pd.DataFrame, measured: Measured, negligible: float) -> pd.DataFrame:
    """Return a row for each head or group: ``index``, its quantities and their errors, and the verdict."""
    table, df = _with_estimates(index, measured), degrees_of_freedom(measured.n_predictions)
    table["content_distance"] = measured.content_distance
    p = [1 - significance(abs(x), e, df) for x, e in table[["difference", "difference_se"]].itertuples(index=False)]
    unknown = table["difference"].isna().to_numpy()
    tests = torch.tensor(p, dtype=torch.float64).masked_fill(torch.tensor(unknown), nan)
    table["q"] = false_discovery_rates(tests).numpy()
    table["measured"] = ["run" if run else "estimated" for run in measured.run.tolist()]
    over_texts = _with_estimates(index, replace(measured, off={}))
    table = table.join(verdicts(table, over_texts, df, negligible))
    first = [*index, "contribution", "contribution_se"]
    table = with_ends(table, first, [*(f"{name}_se" for name in PARTS), PARTS[-1], *PARTS[:-1], "verdict"])
    table.attrs["df"] = df
    return table


def _with_estimates(index: pd.DataFrame, measured: Measured) -> pd.DataFrame:
    """Return ``index`` with the quantities and their standard errors."""
    table = index.copy()
    for name in COLUMNS:
        value, error = measured.estimate(name)
        table[name], table[f"{name}_se"] = value.numpy(), error.numpy()
    return table
