"""Verdicts from the attention ladder: the simplest rung that suffices for each head."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Any, Final

import pandas as pd

from tl_posdisent.additive.attention.rungs import RUNGS
from tl_posdisent.experiments.causal.ladder import MEAN
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.statistics import surely_below
from tl_posdisent.utils.validation import check_number

_VERDICTS = {  # other rungs: their own name
    MEAN: "not used",
    "uniform": "no effect",
    "first_token": "first token",
    "distance+sink": "distance",
}
_BASELINES = (MEAN, "uniform")  # these suffice if they change nothing; other rungs if they recover a share
UNDECIDED = "undecided"
NEGLIGIBLE: Final = 0.001  # nats per token
_COLUMNS = ("kl", "error_kl", "recovered_kl", "se_kl")


def head_verdicts(
    table: pd.DataFrame,
    share: float = 0.95,
    *,
    negligible: float = NEGLIGIBLE,
    confidence: float = 0.95,
) -> pd.DataFrame:
    """Classify each head by the simplest rung of ``attention_ladder`` that recovers a given share of the predictions.

    ====================== =====================================================================
    verdict                what suffices
    ====================== =====================================================================
    *not used*             the head's mean output: what it changes is negligible
    *no effect*            uniform attention: what it changes is negligible
    *first token*          ``"first_token"``: a sink
    *distance*             ``"distance"`` or ``"distance+sink"``
    *static*               ``"static"``: distance and key vector
    *additive*             ``"additive"``, fitted to the text itself: an upper bound
    *more than* …          no rung in the table, of which this is the last: *more than additive* needs the query
    *undecided*            one of several: column ``between`` names the first and the last
    ====================== =====================================================================

    The first verdict that applies is given; *not used* needs the row ``"mean_output"``. A rung *may* suffice if its
    share is not significantly below ``share``, and *does* suffice if it is significantly above: t-intervals with the
    table's ``df`` degrees of freedom (in a table without it, one fewer than ``blocks``). Rungs fitted to the predicted
    text come after the causal ones, so they name a head only if no causal rung may suffice.

    Verdicts compare *predictions*, by KL(untouched ‖ replaced), which has a fraction of the noise of the loss: that of
    its labels, the next tokens that happened to follow. Every replacement changes predictions, so a divergence is
    compared with ``negligible``, not with 0.

    Args:
        table: table of ``attention_ladder``; only rows without a control are read.
        share: share of what uniform attention changes that a rung must recover, above 0 and at most 1.
        negligible: the divergence in nats per token below which a mean output or uniform attention changes nothing that
            matters. A divergence significantly below is *not used* or *no effect*; one that is not significantly below
            or above leaves these verdicts undecided.
        confidence: confidence of each two-sided interval, at least 0 (only the estimates) and below 1. A verdict has
            the same confidence, given the fits, unless several rungs recover almost ``share``. Below a threshold, the
            error of a divergence is scaled up to the threshold, at most three times: divergences of blocks are skewed,
            so their mean and its error are often too small together. Of n heads that are not used, at most
            ``(1 - confidence) / 2 * n`` are expected to be called used by chance.

    Returns:
        One row per head (or layer, or all), in the order of layers and heads: ``layer``, ``head``, ``verdict``;
        ``between``, for undecided heads ``simplest`` and ``at_most`` in words (``"distance+sink and more than
        static"``), empty if decided, or if the table has no rung to name; ``simplest`` and ``at_most``, the simplest
        rung that may suffice and the simplest that does (``"uniform"`` without effect, ``"mean_output"`` for a head
        that is not used, ``"untouched"`` if no rung does); ``causal``; ``gap_mean``, the divergence of
        the mean output in nats per token (NaN without that row), and ``error_mean``, its standard error; ``recovered``
        by ``simplest``, behind its standard error ``se``; ``gap``, ``error``, as ``gap_mean`` under uniform attention.

    Raises:
        ValueError: a table without the columns or rows of ``attention_ladder``; a ladder with ``metric``; an option out
            of range.

    Example:
        >>> import pandas as pd
        >>> from tl_posdisent import head_verdicts
        >>> rungs, divergences = ["uniform", "distance", "static", "untouched"], [1.0, 0.1, 0.02, 0.0]
        >>> table = pd.DataFrame({"rung": rungs, "kl": divergences, "recovered_kl": [0.0, 0.9, 0.98, 1.0]})
        >>> table = table.assign(layer=0, head=3, control="none", se_kl=0.005, error_kl=0.01, blocks=10, causal=True)
        >>> [head_verdicts(table, share)["verdict"].item() for share in (0.95, 0.8, 0.9)]
        ['static', 'distance', 'undecided']
        >>> head_verdicts(table, 0.9)["between"].item()
        'distance and static'
    """
    share = check_number("share", share, above=0, most=1)
    negligible = check_number("negligible", negligible, above=0)
    confidence = check_number("confidence", confidence, least=0, below=1)
    rows = []
    for (layer, head), by_rung in _by_head(table).items():
        simplest, at_most = _suffices(by_rung, share, negligible, confidence)
        of_simplest = (by_rung[simplest][name] for name in ("se_kl", "recovered_kl"))
        of_mean, of_uniform = (
            [by_rung.get(x, {}).get(name, nan) for name in ("gap", "error_kl")] for x in (MEAN, "uniform")
        )
        causal = by_rung[simplest]["causal"]
        named = (*_name(by_rung, simplest, at_most), simplest, at_most, causal)
        rows.append((layer, head, *named, *of_mean, *of_simplest, *of_uniform))
    columns = ["layer", "head", "verdict", "between", "simplest", "at_most", "causal", "gap_mean", "error_mean"]
    columns += ["se", "recovered", "gap", "error"]
    types: dict[str, Any] = {"layer": "Int64", "head": "Int64", "recovered": float, "se": float, "causal": bool}
    return pd.DataFrame(rows, columns=columns).astype(types)


_Rungs = Mapping[Any, Mapping[Any, Any]]
"""The rows of one head by rung, with ``gap``, the divergence from the untouched run."""


def _by_head(table: Any) -> dict[Any, _Rungs]:
    """Validate the table of a ladder, and return the rows of each head by rung."""
    needed = {"layer", "head", "control", "rung", "blocks", "causal", *_COLUMNS}
    if not isinstance(table, pd.DataFrame) or not needed <= set(table.columns):
        raise ArgumentError(
            "table", f"must come from attention_ladder without metric=, with columns {', '.join(sorted(needed))}"
        )
    plain = table[table["control"] == "none"]
    read = plain[["layer", "head", "rung", "causal", *_COLUMNS]].assign(
        df=(plain["df"] if "df" in plain else plain["blocks"] * nan).fillna(plain["blocks"] - 1),  # equal blocks
    )
    rungs: dict[Any, list[Any]] = {}
    for row in read.sort_values(["layer", "head"], kind="stable").to_dict("records"):
        rungs.setdefault(tuple(None if pd.isna(x) else x for x in (row["layer"], row["head"])), []).append(row)
    heads: dict[Any, _Rungs] = {}
    for place, rows in rungs.items():
        by_rung = {row["rung"]: row for row in rows}
        if not {"uniform", "untouched"} <= set(by_rung) or len(by_rung) < len(rows):
            raise ArgumentError("table", "must have one row per rung and head, with the rungs uniform and untouched")
        heads[place] = {x: row | {"gap": row["kl"] - by_rung["untouched"]["kl"]} for x, row in by_rung.items()}
    return heads


def _suffices(by_rung: _Rungs, share: float, negligible: float, confidence: float) -> tuple[str, str]:
    """Return the simplest rung that may suffice and the simplest that does, ``"untouched"`` if no other."""
    may, does = list[str](), list[str]()
    for rung in (x for x in (MEAN, *RUNGS[:-1]) if x in by_rung):
        row = by_rung[rung]
        if rung in _BASELINES:
            fits, sure = surely_below(row["gap"], row["error_kl"], negligible, row["df"])
        else:
            fits, sure = surely_below(1 - row["recovered_kl"], row["se_kl"], 1 - share, row["df"])
        if fits or not sure >= confidence:
            may.append(rung)
        if fits and sure >= confidence:
            does.append(rung)
    return next(iter(may), "untouched"), next(iter(does), "untouched")


def _name(by_rung: _Rungs, simplest: str, at_most: str) -> tuple[str, str]:
    """Return the verdict of a head for which ``simplest`` may suffice and ``at_most`` does, and between what it is.

    Rungs of one verdict leave no doubt about it; in a doubt, ``"distance+sink"`` is named as in ``simplest``.
    """
    fitted = [_VERDICTS.get(x, x) for x in RUNGS[1:-1] if x in by_rung]
    rest = f"more than {fitted[-1]}" if fitted else UNDECIDED
    first, last = ({**_VERDICTS, "untouched": rest}.get(x, x) for x in (simplest, at_most))
    if first == last:
        return last, ""
    ends = (simplest if simplest == "distance+sink" else first, at_most if at_most == "distance+sink" else last)
    return UNDECIDED, f"{ends[0]} and {'more' if last == UNDECIDED else ends[1]}"
