"""What changed in each head between two models, with errors: a table of both and of their paired differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Final

import pandas as pd
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from tl_posdisent.experiments.measuring.part_runs import Head
from tl_posdisent.experiments.where_what.corrections import bands, from_others, log_ratios, spread_of_ratios
from tl_posdisent.experiments.where_what.measurement import HeadRuns
from tl_posdisent.experiments.where_what.parts import PARTS
from tl_posdisent.experiments.where_what.rows import Measured, from_estimates, from_runs, table_of
from tl_posdisent.utils.statistics import (
    Estimate,
    degrees_of_freedom,
    false_discovery_rates,
    jackknife,
    significance,
)
from tl_posdisent.utils.tables import with_ends

TESTED: Final = ("contribution", *PARTS)
COMPARED: Final = (*TESTED, "difference")
RATE: Final = 0.05
"""The false discovery rate at which a change is named."""
LEAST_PART: Final = 0.01
"""The change of a part below which it is not named, however sure it is."""
WORDS: Final = {
    "contribution": ("contributes more", "contributes less"),
    "where_part": ("more where", "less where"),
    "what_part": ("more what", "less what"),
    "neither_part": ("more neither", "less neither"),
}
"""What a change is called, of each quantity that is tested: upwards and downwards."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Heads of two models, measured on the same texts.

    Attributes:
        before, after: what the heads contribute and keep; the same heads were run in both.
        off: standard error of the estimated change of each head, by column; of ``contribution``, relative. NaN if not
            known.
    """

    before: Measured
    after: Measured
    off: dict[str, Float64[Tensor, " head"]]

    def change(self, column: str) -> Estimate:
        """Return after minus before of each head, and its standard error over texts.

        Where heads were not run, that of the estimated change is included.
        """
        before, after = self.before.values[column], self.after.values[column]
        value, error = jackknife(after - before, self.before.n_predictions)
        size = torch.maximum(before[0], after[0]) if column == "contribution" else 1.0
        off = torch.where(self.before.run, 0.0, (self.off[column] * size).nan_to_num())
        return Estimate(value, (error.square() + off.square()).sqrt())


def compared(
    pairs: Sequence[Head],
    n_layers: int,
    before: HeadRuns,
    after: HeadRuns,
    places: Sequence[int],
    n_predictions: Float64[Tensor, " text"],
) -> Comparison:
    """Compare the heads of two models, of which those at ``places`` were run in both.

    What runs say about estimates is paired, too: in the two models the same head is estimated with the same draws, so
    the error of an estimated *change* is how far changes of the estimates were from those of the runs.
    """
    models = (before, after)
    sides = [from_estimates(pairs, n_layers, x.estimated, x.measured, places, n_predictions) for x in models]
    first, second = (from_runs(x.estimated, n_predictions).values for x in models)
    run, band, off = sides[0].run, bands(pairs, n_layers), {}
    for name in COMPARED[1:]:
        squares = (second[name] - first[name] - sides[1].values[name] + sides[0].values[name])[0].square()
        off[name] = from_others(squares, band, run & ~squares.isnan()).sqrt()
    contribution = [x.values["contribution"][0] for x in sides]
    ratio = torch.where(run, contribution[1] / contribution[0], nan)
    logs = log_ratios(second["contribution"][0] / first["contribution"][0], ratio)
    return Comparison(sides[0], sides[1], off | {"contribution": spread_of_ratios(logs, band)})


def table_of_changes(pairs: Sequence[Head], found: Comparison, negligible: float) -> pd.DataFrame:
    """Return a row for each head: both models, what changed, and how sure that is."""
    index = pd.DataFrame(pairs, columns=["layer", "head"])
    tables = {"before": table_of(index, found.before, negligible), "after": table_of(index, found.after, negligible)}
    table = index.copy()
    changes = {name: found.change(name) for name in COMPARED}
    not_used = [torch.tensor((x["verdict"] == "not used").to_numpy()) for x in tables.values()]
    rates = _rates(changes, not_used, found.before.n_predictions)
    for name in COMPARED:
        for when, own in tables.items():
            table[f"{name}_{when}"], table[f"{name}_{when}_se"] = own[name], own[f"{name}_se"]
        table[f"{name}_change"], table[f"{name}_change_se"] = (x.numpy() for x in changes[name])
        if name in TESTED:
            table[f"{name}_q"] = rates[name].numpy()
    for when, own in tables.items():
        table[f"verdict_{when}"] = own["verdict"]
    table["changed"] = [_named(row, negligible) for row in table.to_dict("records")]
    table["measured"] = tables["before"]["measured"]
    return with_ends(table, ["layer", "head", "contribution_change", "contribution_change_se"], ())


def _rates(
    changes: Mapping[str, Estimate], not_used: Sequence[Bool[Tensor, " head"]], n_predictions: Float64[Tensor, " text"]
) -> dict[str, Float64[Tensor, " head"]]:
    """Return the false discovery rate of each change: of contributions among all heads, of parts among those of all.

    The parts of a head that is not used in one of the models are not tested, nor the contribution of one that is used
    in none.
    """
    df, (before, after), tests = degrees_of_freedom(n_predictions), not_used, dict[str, Tensor]()
    for name in TESTED:
        value, error = changes[name]
        p = [1 - significance(abs(x), e, df) for x, e in zip(value.tolist(), error.tolist(), strict=True)]
        untested = value.isnan() | ((before & after) if name == "contribution" else (before | after))
        tests[name] = torch.tensor(p, dtype=torch.float64).masked_fill(untested, nan)
    of_parts = false_discovery_rates(torch.cat([tests[name] for name in PARTS])).view(len(PARTS), -1)
    return {"contribution": false_discovery_rates(tests["contribution"])} | dict(zip(PARTS, of_parts, strict=True))


def _named(row: Mapping[object, float], negligible: float) -> str:
    """Name what surely changed in a head."""
    least = {name: negligible if name == "contribution" else LEAST_PART for name in TESTED}
    sure = [name for name in TESTED if row[f"{name}_q"] <= RATE and abs(row[f"{name}_change"]) >= least[name]]
    return ", ".join(WORDS[name][row[f"{name}_change"] < 0] for name in sure)
