"""What share of a head's contribution survives a replacement, with errors over texts, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.experiments.where_what.replacements import CONSTANTS, DISTANCE, MEAN, UNIFORM, content_alone
from tl_posdisent.utils.statistics import degrees_of_freedom, mean, ratio, surely_below

Verdict = Literal["where", "what", "both", "either", "neither", "not used", "undecided"]
NEGLIGIBLE: Final = 0.0005  # nats per predicted token
HALF: Final = 0.5
"""The share of the contribution that has to survive."""
CONFIDENCE: Final = 0.95
"""With which a share has to be on one side of ``HALF``, one-sided, by t over texts."""
_VERDICTS: dict[tuple[bool, bool], Verdict] = {  # whether distances alone and content alone suffice
    (True, False): "where",
    (False, True): "what",
    (False, False): "both",
}


def shares(
    contribution: Float64[Tensor, "text head"],
    distance: Float64[Tensor, "text head"],
    uniform: Float64[Tensor, "text head"],
    content: Float64[Tensor, "constant text head"],
    n_predictions: Float64[Tensor, " text"],
    constants: tuple[int, ...],
) -> pd.DataFrame:
    """Compute the shares of each head's contribution that survive.

    With K the mean divergence over the predicted tokens of all texts: ``where = 1 - K_distance / K_contribution``,
    ``what = 1 - K_content / K_contribution``, and the same for ``uniform``. The constant of K_content is that of the
    smallest divergence in the *other* texts, for each text: chosen in the same text, the smallest of several would be
    too small by chance.

    Args:
        contribution: divergences under the mean output, nats per predicted token of each text.
        distance: under attention by the distance alone.
        uniform: under uniform attention.
        content: with every other key at one distance, for each of ``constants``.

    Returns:
        One row per head: ``where``, ``what``, ``uniform`` (from 0 to 1), the same ``…_unclipped``, ``contribution``,
        each with its standard error over texts ``…_se``, and ``content_distance``, the constant of the smallest
        divergence.
    """
    weights = (n_predictions / n_predictions.sum())[:, None]
    sums = (weights * content).sum(1)
    of_others = (sums[:, None] - weights * content).argmin(0)
    chosen = content.gather(0, of_others[None])[0]
    table = pd.DataFrame()
    for name, divergences in (("where", distance), ("what", chosen), ("uniform", uniform)):
        lost, error = ratio(divergences, contribution, n_predictions)
        table[name], table[f"{name}_se"] = (1 - lost).clamp(0, 1).numpy(), error.numpy()
        table[f"{name}_unclipped"] = (1 - lost).numpy()
    contributions, errors = mean(contribution, n_predictions)
    table["contribution"], table["contribution_se"] = contributions.numpy(), errors.numpy()
    table["content_distance"] = [constants[n] for n in sums.argmin(0).tolist()]
    return table


def shares_of(
    divergences: Mapping[str, Float64[Tensor, "text head"]], n_predictions: Float64[Tensor, " text"]
) -> pd.DataFrame:
    """Compute ``shares`` from the divergences under each of the ``replacements``, by name."""
    contribution, distance, uniform = (divergences[name] for name in (MEAN, DISTANCE, UNIFORM))
    content = torch.stack([divergences[content_alone(constant)] for constant in CONSTANTS])
    return shares(contribution, distance, uniform, content, n_predictions, CONSTANTS)


def verdicts(table: pd.DataFrame, n_predictions: Float64[Tensor, " text"], negligible: float) -> list[Verdict]:
    """Decide each row of ``shares``: whether more than half of the contribution survives, in each of two ways.

    A head is *not used* if its contribution is below ``negligible`` with 95 % confidence. Otherwise each of the two
    shares has to be above or below ``HALF`` with this confidence; if one is not, the head is *undecided*. Where both
    are above, the share under uniform attention says whether the pattern matters at all.

    Divergences are skewed: where no text has a large one, too much seems to survive, with too small an error. Errors of
    shares above ``HALF`` are therefore scaled as in ``surely_below``. In simulations a share of exactly a half is then
    taken for more, and for less, in 3 to 6 % of the heads; for content, in up to 10 % where several constants are
    equally good.
    """
    df = degrees_of_freedom(n_predictions)
    return [_verdict(row, df, negligible) for row in table.to_dict("records")]


def _verdict(head: Mapping[Any, Any], df: float, negligible: float) -> Verdict:
    # The confidence of a one-sided test is that of a two-sided one with twice the error rate.
    two_sided = 2 * CONFIDENCE - 1
    below, confidence = surely_below(head["contribution"], head["contribution_se"], negligible, df)
    if below and confidence >= two_sided:
        return "not used"
    lost = {  # whether at most half of the contribution is lost, and with what confidence
        name: surely_below(1 - head[f"{name}_unclipped"], head[f"{name}_se"], 1 - HALF, df)
        for name in ("where", "what", "uniform")
    }
    suffices = {name: below for name, (below, confidence) in lost.items() if confidence >= two_sided}
    if not {"where", "what"} <= set(suffices):
        return "undecided"
    if not (suffices["where"] and suffices["what"]):
        return _VERDICTS[suffices["where"], suffices["what"]]
    if "uniform" not in suffices:
        return "undecided"
    return "neither" if suffices["uniform"] else "either"
