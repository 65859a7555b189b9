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
    sentence = Markup(
        "<em>r</em> of {} is {} on average, that of random weights {} ({}, {}; ± is a standard error over texts and "
        "copies, if there are several); {} {}."
    )
    texts, copies = plural(count_texts(trained), "text"), count_copies(random)
    means = _mean_with_error(trained, column), _mean_with_error(random, column)
    above = above_random(trained, random, column)
    return [sentence.format(model, *means, texts, copies, above, link_section(name, measurement))]


def count_texts(table: pd.DataFrame) -> int:
    """Return the number of texts of a table."""
    return table["batch"].nunique() if "batch" in table else 1


def count_copies(random: pd.DataFrame) -> str:
    """``2 random copies``."""
    return plural(random["seed"].nunique(), "random copy", "random copies")


def _mean_with_error(table: pd.DataFrame, column: str) -> str:
    """Format the mean over heads, texts and copies, ± its standard error if there are several texts or copies."""
    mean, error = number(by_head(table)[column].mean(), 2), error_over_draws(table, column, ["batch", "seed"])
    return f"{mean} ± {number(error, 2)}" if error else mean
