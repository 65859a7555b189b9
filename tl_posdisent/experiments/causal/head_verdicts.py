"""Verdicts from the attention ladder: the simplest rung that suffices for each head."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isnan, nan
from typing import Any, Final, Literal, get_args

import pandas as pd

from tl_posdisent.additive.attention.rungs import RUNGS
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.precision import apart
from tl_posdisent.utils.statistics import confidence_of_selected, significance, surely_below
from tl_posdisent.utils.validation import check_choice, check_number

from .ladder_runs import MEAN

_VERDICTS = {  # other rungs: their own name
    MEAN: "not used",
    "uniform": "no effect",
    "first_token": "first token",
    "distance+sink": "distance",
}
_BASELINES = (MEAN, "uniform")  # these suffice if they cost nothing; other rungs if they recover a share
UNDECIDED = "undecided"
NEGLIGIBLE: Final = 0.001  # nats per token

Correction = Literal["none", "fdr"]
"""Correction of a verdict's intervals for the number of heads: none, or by the false discovery rate."""
Measure = Literal["kl", "loss", "metric"]
"""What verdicts are decided by: the divergence of predictions, the loss, or the metric of ``attention_ladder``."""
_COLUMNS: dict[Measure, dict[str, str]] = {
    "kl": {"value": "kl", "error": "error_kl", "recovered": "recovered_kl", "se": "se_kl"},
    "loss": {"value": "loss", "error": "error", "recovered": "recovered", "se": "se"},
    "metric": {"value": "value", "error": "error", "recovered": "recovered", "se": "se"},
}


def head_verdicts(
    table: pd.DataFrame,
    share: float = 0.95,
    *,
    measure: Measure | None = None,
    negligible: float = NEGLIGIBLE,
    confidence: float = 0.95,
    correction: Correction = "none",
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

    By default, verdicts compare *predictions*, by KL(untouched ‖ replaced). They decide more heads than verdicts from
    the loss do with the same texts, because the loss has the noise of its labels: the next tokens that happened to
    follow. Every replacement changes predictions, so a divergence is compared with ``negligible``, not with 0. Verdicts
    from the loss say whether predictions become *worse*; a change of the loss that is within noise counts as nothing
    there, however large the noise.

    Args:
        table: table of ``attention_ladder``; only rows without a control are read.
        share: share of what uniform attention changes that a rung must recover, above 0 and at most 1.
        measure: ``"kl"``: divergences of predictions, with shares ``recovered_kl``; ``"loss"``: losses, with shares
            ``recovered``; ``"metric"``: the table's metric. Default ``"metric"`` if the table has one, else ``"kl"``.
        negligible: with ``"kl"``, the divergence in nats per token below which a mean output or uniform attention
            changes nothing that matters. A divergence significantly below is *not used* or *no effect*; one that is
            not significantly below or above leaves these verdicts undecided. Not read with the other measures.
        confidence: confidence of each two-sided interval, at least 0 (only the estimates) and below 1. A verdict has
            the same confidence, given the fits, unless several rungs recover almost ``share``. Below a threshold, the
            error of a divergence is scaled up to the threshold, at most three times: divergences of blocks are skewed,
            so their mean and its error are often too small together.
        correction: correction for the number of heads in the table. With ``"none"``, ``(1 - confidence) / 2 * n`` of n
            heads that are not used are expected to be called used by chance (with ``"kl"``, at most as many, and hardly
            any whose divergence is well below ``negligible``). With ``"fdr"``, the expected share of such heads among
            those called used is at most ``1 - confidence`` (Benjamini and Hochberg, 1995). If k of n heads pass, every
            interval has the confidence ``1 - (1 - confidence) * k / n`` (Benjamini and Yekutieli, 2005, for selected
            intervals), which is in ``attrs["confidence"]`` of the table.

    Returns:
        One row per head (or layer, or all), in the order of layers and heads: ``layer``, ``head``, ``verdict``;
        ``between``, for undecided heads ``simplest`` and ``at_most`` in words (``"distance+sink and more than
        static"``), empty if decided, or if the table has no rung to name; ``simplest`` and ``at_most``, the simplest
        rung that may suffice and the simplest that does (``"uniform"`` without effect, ``"mean_output"`` for a head
        that is not used, ``"untouched"`` if no rung does); ``recovered`` by ``simplest``, ``se``, ``causal``; ``gap``,
        what uniform attention changes (its divergence or added loss in nats per token, or the change of the metric) and
        ``error`` (its standard error); ``gap_mean``, ``error_mean``, the same for the mean output (NaN without that
        row). A table without errors has no ``se``, ``error`` and ``error_mean``. The measure is in
        ``attrs["measure"]``, the confidence of each interval in ``attrs["confidence"]``.

    Raises:
        ValueError: a table without the columns or rows of ``attention_ladder``, or without those of ``measure``; an
            option out of range.

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
    check_choice("correction", correction, get_args(Correction))
    measure = _measure_of(table, measure)
    heads = _by_head(table, measure)
    if correction == "fdr":
        chances = [_by_chance(x, MEAN if MEAN in x else "uniform", measure, negligible) for x in heads.values()]
        confidence = confidence_of_selected(chances, confidence)
    rows = []
    for (layer, head), by_rung in heads.items():
        simplest, at_most = _suffices(by_rung, measure, share, negligible, confidence)
        of_simplest = (by_rung[simplest][name] for name in ("recovered", "se", "causal"))
        ends = (by_rung.get(x, {}).get(name, nan) for x in ("uniform", MEAN) for name in ("gap", "error"))
        rows.append((layer, head, *_name(by_rung, simplest, at_most), simplest, at_most, *of_simplest, *ends))
    columns = ["layer", "head", "verdict", "between", "simplest", "at_most", "recovered", "se", "causal"]
    columns += ["gap", "error", "gap_mean", "error_mean"]
    types: dict[str, Any] = {"layer": "Int64", "head": "Int64", "recovered": float, "se": float, "causal": bool}
    verdicts = pd.DataFrame(rows, columns=columns).astype(types)
    if not {_COLUMNS[measure][name] for name in ("error", "se")} & set(table.columns):
        verdicts = verdicts.drop(columns=["se", "error", "error_mean"])
    verdicts.attrs |= {"confidence": confidence, "measure": measure}
    return verdicts


_Rungs = Mapping[Any, Mapping[Any, Any]]
"""The rows of one head by rung, with ``value``, ``error``, ``recovered`` and ``se`` of the measure, and ``gap``."""


def _measure_of(table: Any, measure: Measure | None) -> Measure:
    """Return the measure, by default the metric of the table or the divergence, and check that the table has it."""
    of_metric = isinstance(table, pd.DataFrame) and "value" in table
    if measure is None:
        measure = "metric" if of_metric else "kl"
    check_choice("measure", measure, get_args(Measure))
    if of_metric and measure != "metric":
        raise ArgumentError(
            "measure", f"must be 'metric' for a metric's table, whose blocks are texts, got {measure!r}"
        )
    names = [x for name, x in _COLUMNS[measure].items() if measure != "metric" or name not in ("error", "se")]
    needed = {"layer", "head", "control", "rung", "blocks", "causal", *names}
    if not isinstance(table, pd.DataFrame) or not needed <= set(table.columns):
        raise ArgumentError(
            "table",
            f"must come from attention_ladder, with columns {', '.join(sorted(needed))} for measure={measure!r}",
        )
    return measure


def _by_head(table: pd.DataFrame, measure: Measure) -> dict[Any, _Rungs]:
    """Return the rows of each head by rung, under the names that all measures share."""
    plain = table[table["control"] == "none"]
    read = plain[["layer", "head", "rung", "causal"]].assign(
        **{name: plain.get(column, nan) for name, column in _COLUMNS[measure].items()},  # no error of a single text
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
        heads[place] = {x: row | {"gap": row["value"] - by_rung["untouched"]["value"]} for x, row in by_rung.items()}
    return heads


def _suffices(by_rung: _Rungs, measure: Measure, share: float, negligible: float, confidence: float) -> tuple[str, str]:
    """Return the simplest rung that may suffice and the simplest that does, ``"untouched"`` if no other."""
    may, does = list[str](), list[str]()
    for rung in (x for x in (MEAN, *RUNGS[:-1]) if x in by_rung):
        row = by_rung[rung]
        if measure == "kl":
            threshold, value = (negligible, row["gap"]) if rung in _BASELINES else (1 - share, 1 - row["recovered"])
            fits, sure = surely_below(value, row["error" if rung in _BASELINES else "se"], threshold, row["df"])
        elif rung in _BASELINES:  # costs no more than chance
            fits, sure = _by_chance(by_rung, rung, measure, negligible) > 1 - confidence, 1.0
        else:
            above = row["recovered"] - share
            fits, sure = above >= 0, significance(abs(above), row["se"], row["df"])
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


def _by_chance(by_rung: _Rungs, rung: str, measure: Measure, negligible: float) -> float:
    """Compute the p-value of a baseline's gap to the untouched model, or of a divergence that is not negligible.

    It is infinite if the baseline is not worse beyond rounding, or its divergence is below ``negligible``. With one
    text there is no error, and any gap has p = 0.
    """
    row, untouched = by_rung[rung], by_rung["untouched"]
    if measure == "kl":
        below, sure = surely_below(row["gap"], row["error"], negligible, row["df"])
        return inf if below else 1 - sure
    effect = row["gap"] if measure == "loss" else abs(row["gap"])
    if not (effect > 0 and apart(row["value"], untouched["value"])):
        return inf
    return 0.0 if isnan(row["error"]) else 1 - significance(effect, row["error"], row["df"])
