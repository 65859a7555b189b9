"""The sentence that compares a mean correlation with that of scores that no head computes."""

from __future__ import annotations

from markupsafe import Markup

from tl_posdisent.page.deciding.links import link_section
from tl_posdisent.page.deciding.words import number, signed
from tl_posdisent.page.measuring.measurement import Measurement
from tl_posdisent.utils.statistics import error_over_draws, significance

_CONFIDENCE = 0.95
"""Confidence of the t-interval over texts that has to exclude 0."""
FOREIGN_KEYS = "r, foreign keys"
"""The column of the correlation of a head's queries with the keys of another key head."""


def compare_with_foreign_keys(measurement: Measurement, column: str, name: str) -> list[Markup]:
    """Compare the mean of ``column`` with that of ``FOREIGN_KEYS``; no sentence without this control."""
    trained = measurement.trained
    if FOREIGN_KEYS not in trained or trained[FOREIGN_KEYS].isna().all():
        return []
    rows = trained.assign(difference=trained[column] - trained[FOREIGN_KEYS])
    mean, error = rows["difference"].mean(), error_over_draws(rows, "difference", ["batch"])
    over_texts = f" ± {number(error, 3)} (a standard error over texts)" if error else ""
    difference = f"{signed(mean)}{over_texts}"
    sentence = Markup(
        "The queries of each head with the keys of another key head, scores that no head computes, have an <em>r</em> "
        "of {}: own minus other keys is {}{} {}."
    )
    certain = significance(abs(mean), error, trained["batch"].nunique() - 1) >= _CONFIDENCE
    foreign, conclusion = number(trained[FOREIGN_KEYS].mean(), 2), Markup(_conclusion(mean, error, certain))
    return [sentence.format(foreign, difference, conclusion, link_section(name, measurement))]


def _conclusion(mean: float, error: float, certain: bool) -> str:
    """Say which keys have the larger mean r, if a 95 % t-interval over texts excludes 0; not why."""
    if not error:
        return ""
    if not certain:
        return ", which these texts do not tell from 0"
    return f", so on average heads are {'more' if mean > 0 else 'less'} additive with their own keys"
