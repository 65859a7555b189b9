"""Verdicts from the attention ladder: the simplest rung that suffices for each head."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isnan, nan
from typing import Any, Literal, get_args

import pandas as pd

from tl_posdisent.additive.attention.rungs import RUNGS
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.precision import apart
from tl_posdisent.utils.statistics import confidence_of_selected, significance
from tl_posdisent.utils.validation import check_choice, check_number

from .attention_ladder import MEAN

_VERDICTS = {MEAN: "not used", "uniform": "no effect", "first_token": "first token", "distance+sink": "distance"}
_VERDICTS |= {"low-rank": "query-dependent"}  # other rungs: their own name


Correction = Literal["none", "fdr"]
"""Correction of a verdict's intervals for the number of heads: none, or by the false discovery rate."""


def head_verdicts(
    table: pd.DataFrame, share: float = 0.95, *, confidence: float = 0.95, correction: Correction = "none"
) -> pd.DataFrame:
    """Classify each head by the simplest rung of ``attention_ladder`` that recovers a given share of the loss.

    ====================== =====================================================================
    verdict                what suffices
    ====================== =====================================================================
    *not used*             the head's mean output: it costs no more than chance
    *no effect*            uniform attention: it costs no more than chance
    *first token*          ``"first_token"``: a sink
    *distance*             ``"distance"`` or ``"distance+sink"``
    *static*               ``"static"``: distance and key vector
    *additive*, *banded*   the rung of that name, fitted to the text itself: an upper bound
    *query-dependent*      ``"low-rank"``, or only the head's own attention
    *more than* …          no rung in the table, if it leaves out ``"banded"``
    *undecided between* …  the simplest rung that may suffice, and the simplest that does
    ====================== =====================================================================

    The first verdict that applies is given; *not used* needs the row ``"mean_output"``. A rung *may* suffice if its
    share is not significantly below ``share``, and *does* suffice if it is significantly above: t-intervals of
    ``recovered`` with the table's ``df`` degrees of freedom (in a table without it, one fewer than ``blocks``). Rungs
    fitted to the predicted text come after the causal ones, so they name a head only if no causal rung may suffice.

    Args:
        table: table of ``attention_ladder``; only rows without a control are read.
        share: share of the loss between uniform and untouched attention, above 0 and at most 1.
        confidence: confidence of each two-sided interval, at least 0 (only the estimates) and below 1. A verdict has
            the same confidence, given the fits, unless several rungs recover almost ``share``.
        correction: correction for the number of heads. With ``"none"``, ``(1 - confidence) / 2 * n`` of n heads that
            are not used are expected to be called used by chance. With ``"fdr"``, the expected share of such heads
            among those called used is at most ``1 - confidence`` (Benjamini and Hochberg, 1995). If k of n heads pass,
            every interval has the confidence ``1 - (1 - confidence) * k / n`` (Benjamini and Yekutieli, 2005, for
            selected intervals), which is in ``attrs["confidence"]`` of the table.

    Returns:
        One row per head (or layer, or all): ``layer``, ``head``, ``verdict``; ``simplest`` and ``at_most``, the
        simplest rung that may suffice and the simplest that does (``"uniform"`` without effect, ``"mean_output"`` for a
        head that is not used); ``recovered`` by ``simplest``, ``se``, ``causal``; ``gap`` (uniform minus untouched, of
        the loss in nats per token or of the table's metric) and ``error`` (its standard error); ``gap_mean``,
        ``error_mean``, the same for the mean output (NaN without that row).

    Raises:
        ValueError: a table without the columns or rows of ``attention_ladder``; a share or confidence out of range.

    Example:
        >>> import pandas as pd
        >>> from tl_posdisent import head_verdicts
        >>> rungs, losses = ["uniform", "distance", "static", "untouched"], [3.0, 2.1, 2.02, 2.0]
        >>> table = pd.DataFrame({"rung": rungs, "loss": losses, "recovered": [0.0, 0.9, 0.98, 1.0], "blocks": 10})
        >>> table = table.assign(layer=0, head=3, control="none", se=0.01, error=0.01, causal=True)
        >>> [head_verdicts(table, share)["verdict"].item() for share in (0.95, 0.8, 0.9)]
        ['static', 'distance', 'undecided between distance and static']
    """
    share = check_number("share", share, above=0, most=1)
    confidence = check_number("confidence", confidence, least=0, below=1)
    check_choice("correction", correction, get_args(Correction))
    needed = {"layer", "head", "control", "rung", "loss", "recovered", "se", "error", "blocks", "causal"}
    if not isinstance(table, pd.DataFrame) or not needed <= set(table.columns):
        raise ArgumentError("table", f"must come from attention_ladder, with columns {', '.join(sorted(needed))}")
    measure = "value" if "value" in table else "loss"
    heads: dict[Any, dict[Any, dict[Any, Any]]] = {}
    for place, some in table[table["control"] == "none"].groupby(["layer", "head"], dropna=False):
        heads[place] = {row["rung"]: row for row in some.to_dict("records")}
        if not {"uniform", "untouched"} <= set(heads[place]) or len(heads[place]) < len(some):
            raise ArgumentError("table", "must have one row per rung and head, with the rungs uniform and untouched")
    if correction == "fdr":
        confidence = confidence_of_selected([_p_values(by_rung, measure)[0] for by_rung in heads.values()], confidence)
    rows = []
    for (layer, head), by_rung in heads.items():
        untouched = by_rung["untouched"]
        gaps = {x: by_rung[x][measure] - untouched[measure] for x in (MEAN, "uniform") if x in by_rung}
        by_chance = (x for x, p in zip(gaps, _p_values(by_rung, measure), strict=True) if p > 1 - confidence)
        simplest = at_most = next(by_chance, "")
        if not simplest:
            tried = [x for x in RUNGS[1:] if x in by_rung]
            above = {x: by_rung[x]["recovered"] - share for x in tried}
            sure = {x: significance(abs(above[x]), by_rung[x]["se"], _df(by_rung[x])) for x in tried}
            simplest = next((x for x in tried if above[x] >= 0 or not sure[x] >= confidence), "untouched")
            at_most = next((x for x in tried if above[x] >= 0 and sure[x] >= confidence), "untouched")
        fitted = [_VERDICTS.get(x, x) for x in RUNGS[1:-1] if x in by_rung]
        # "query-dependent" needs a table with all other rungs.
        rest = "query-dependent" if "banded" in by_rung else f"more than {fitted[-1]}" if fitted else "undecided"
        first, last = ({**_VERDICTS, "untouched": rest}.get(x, x) for x in (simplest, at_most))
        verdict = first if first == last else f"undecided between {first} and {last}"
        found = (by_rung[simplest][name] for name in ("recovered", "se", "causal"))
        ends = (x for name in ("uniform", MEAN) for x in (gaps.get(name, nan), by_rung.get(name, {}).get("error", nan)))
        rows.append((layer, head, verdict, simplest, at_most, *found, *ends))
    columns = ["layer", "head", "verdict", "simplest", "at_most", "recovered", "se", "causal"]
    columns += ["gap", "error", "gap_mean", "error_mean"]
    types: dict[str, Any] = {"layer": "Int64", "head": "Int64", "recovered": float, "se": float, "causal": bool}
    verdicts = pd.DataFrame(rows, columns=columns).astype(types)
    verdicts.attrs["confidence"] = confidence
    return verdicts


def _p_values(by_rung: Mapping[Any, Mapping[Any, Any]], measure: str) -> list[float]:
    """Compute the p-value of each baseline's gap to the untouched model, the mean output first.

    It is infinite if the baseline is not worse beyond rounding. With one text there is no error, and any gap has p = 0.
    """
    untouched, found = by_rung["untouched"], []
    for row in (by_rung[x] for x in (MEAN, "uniform") if x in by_rung):
        gap, error = row[measure] - untouched[measure], row["error"]
        effect = gap if measure == "loss" else abs(gap)
        if not (effect > 0 and apart(row[measure], untouched[measure])):
            found.append(inf)
        else:
            found.append(0.0 if isnan(error) else 1 - significance(effect, error, _df(row)))
    return found


def _df(row: Mapping[Any, Any]) -> float:
    """Return the degrees of freedom of a row; in a table without them, those of blocks of equal size."""
    df = float(row.get("df", nan))
    return row["blocks"] - 1 if isnan(df) else df
