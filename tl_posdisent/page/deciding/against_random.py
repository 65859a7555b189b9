"""The sentence that compares a mean correlation with that of random weights."""

from __future__ import annotations

import pandas as pd
from markupsafe import Markup

from tl_posdisent.experiments.measuring.above_random import above_random
from tl_posdisent.page.deciding.links import link_section
from tl_posdisent.page.deciding.words import number
from tl_posdisent.page.measuring.measurement import Measurement, by_head
from tl_posdisent.utils.statistics import error_over_draws
from tl_posdisent.utils.words import plural


def compare_with_random(measurement: Measurement, column: str, model: str, name: str) -> list[Markup]:
    """Compare the mean with that of random weights, and state how many heads exceed these.

    Args:
        measurement: of the section ``name``.
        column: the correlation.
        model: what has this correlation with the scores, in words.
        name: the section to which the sentence links.

    Returns:
        One sentence; none without random weights, or where the column has no number.
    """
    trained, random = measurement.trained, measurement.random
    if random is None or trained[column].isna().all():
        return []
    sentence = Markup("<em>r</em> of {} is {} on average, that of random weights {} ({}); {} {}.")
    means = _mean_with_error(trained, column), _mean_with_error(random, column)
    above = above_random(trained, random, column)
    return [sentence.format(model, *means, _draws(trained, random), above, link_section(name, measurement))]


def _draws(trained: pd.DataFrame, random: pd.DataFrame) -> str:
    """Count texts, if each has numbers of its own, and copies; and state over which of them ± is a standard error."""
    counts = {"texts": count_texts(trained) if "batch" in trained else 0, "copies": random["seed"].nunique()}
    draws = [plural(counts["texts"], "text")] if counts["texts"] else []
    several = [name for name, count in counts.items() if count > 1]
    error = f"; ± is a standard error over {' and '.join(several)}" if several else ""
    return ", ".join([*draws, count_copies(random)]) + error


def count_texts(table: pd.DataFrame) -> int:
    """Return the number of texts of a table."""
    return table["batch"].nunique() if "batch" in table else 1


def count_copies(random: pd.DataFrame) -> str:
    """``2 random copies``."""
    return plural(random["seed"].nunique(), "random copy", "random copies")


def _mean_with_error(table: pd.DataFrame, column: str) -> str:
    """Format the mean over heads, texts and copies, ± its standard error if there are several texts or copies."""
    mean, error = by_head(table)[column].mean(), error_over_draws(table, column, ["batch", "seed"])
    digits = 3 if 0 < error < 0.01 else 2  # an error of 0.00 would say nothing
    return number(mean, digits) + (f" ± {number(error, digits)}" if error else "")
