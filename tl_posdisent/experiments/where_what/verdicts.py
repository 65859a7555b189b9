"""The verdict on each head, from the parts of its contribution and their errors over texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import pandas as pd

from tl_posdisent.utils.statistics import significance, surely_below

Verdict = Literal["where", "what", "mixed", "neither", "not used", "undecided"]
NEGLIGIBLE: Final = 0.0005  # nats per prediction
HALF: Final = 0.5
"""The share of its contribution above which a head keeps too much with uniform attention for its pattern to matter."""
SIMILAR: Final = 0.2
"""The difference of the parts *where* and *what* below which they are similar."""
CONFIDENCE: Final = 0.95
_ONE_SIDED: Final = 2 * CONFIDENCE - 1  # the confidence of the two-sided interval that ends where a one-sided one does
_ERRORS: Final = ("contribution_se", "kept_uniform_se", "difference_se")
_TIMES: Final = 4  # as many texts, with half the errors, may decide a head of which only the error is open


def verdicts(table: pd.DataFrame, over_texts: pd.DataFrame, df: float, negligible: float) -> pd.DataFrame:
    """Decide each row of a table of ``where_or_what``: ``verdict``, and what is ``open`` of an undecided one.

    Divergences are skewed: where no text has a large one, too much seems to survive, with too small an error. Errors of
    the share under uniform attention are therefore scaled as in ``surely_below``.

    Args:
        over_texts: the errors of the same rows that runs of the heads would leave: those over texts alone.
        df: degrees of freedom of the errors.
        negligible: the contribution in nats per prediction below which a head is not used.
    """
    rows = zip(table.to_dict("records"), over_texts[[*_ERRORS]].to_dict("records"), strict=True)
    found = [(_verdict(row, df, negligible), row, errors) for row, errors in rows]
    opened = [_open(row, errors, df, negligible) if verdict == "undecided" else "" for verdict, row, errors in found]
    return pd.DataFrame({"verdict": [verdict for verdict, *_ in found], "open": opened}, index=table.index)


def _verdict(head: Mapping[Any, Any], df: float, negligible: float) -> Verdict:
    below, sure = surely_below(head["contribution"], head["contribution_se"], negligible, df)
    if below and sure >= _ONE_SIDED:
        return "not used"
    uniform = head["kept_uniform"]
    below, sure = surely_below(1 - uniform, head["kept_uniform_se"], 1 - HALF, df)
    if below and sure >= _ONE_SIDED:
        return "neither"
    return _where_or_what(head, df) if uniform <= HALF else "undecided"


def _where_or_what(head: Mapping[Any, Any], df: float) -> Verdict:
    """Decide by the difference of the parts alone."""
    difference, error = head["difference"], head["difference_se"]
    if abs(difference) < SIMILAR and significance(SIMILAR - abs(difference), error, df) >= _ONE_SIDED:
        return "mixed"
    if significance(abs(difference), error, df) >= CONFIDENCE:
        return "where" if difference > 0 else "what"
    return "undecided"


def _open(head: Mapping[Any, Any], over_texts: Mapping[Any, float], df: float, negligible: float) -> str:
    """Say what is open of an undecided head: the estimate, the error over texts, or which of two verdicts it has."""
    run = {**head, **over_texts}
    if head["measured"] == "estimated" and _verdict(run, df, negligible) != "undecided":
        return "a run"
    of_more = {**run, **{name: error / _TIMES**0.5 for name, error in over_texts.items()}}
    if _verdict(of_more, df, negligible) == "undecided" and (other := _where_or_what(run, df)) != "undecided":
        return f"neither or {other}"
    return "more texts"
