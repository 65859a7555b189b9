"""The sentences on what the heads of a model need, and where those of a random copy of its weights lie."""

from __future__ import annotations

from typing import get_args

import pandas as pd
from markupsafe import Markup

from tl_posdisent.experiments.needs.shares import Verdict
from tl_posdisent.experiments.needs.where_or_what import statement
from tl_posdisent.page.deciding.links import link_section
from tl_posdisent.page.deciding.words import counted, number
from tl_posdisent.page.measuring.measurement import Measurement
from tl_posdisent.utils.words import plural

_SHARES = ("where", "what")


def describe_model(table: pd.DataFrame, measurement: Measurement, name: str) -> Markup:
    """Count the verdicts, and state how large the errors over texts are."""
    counts = Markup("{} {}.").format(statement(table).removesuffix("."), link_section(name, measurement))
    used = table[table["verdict"] != "not used"]
    if used.empty:
        return counts
    medians = [number(used[f"{share}_se"].median(), 2) for share in _SHARES]
    errors = Markup(
        " The shares that survive with distances alone and with content alone have standard errors over texts of {} "
        "and {} (medians of the heads that contribute)."
    )
    return counts + errors.format(*medians)


def describe_copy(random: pd.DataFrame) -> Markup:
    """State where the heads of a random copy lie, and their verdicts."""
    used = random[random["verdict"] != "not used"]
    sentence = Markup("In a random copy of the weights, {} of {} contribute measurably{}.")
    heads = plural(len(random), "head")
    if used.empty:
        return sentence.format("none", heads, "")
    shares = [_middle_and_range(used[name]) for name in _SHARES]
    verdicts = {name: n for name in get_args(Verdict) if (n := int((used["verdict"] == name).sum()))}
    where = Markup(": distances alone keep {}, content alone {} (medians, and from 5 to 95 % of the heads): {}")
    return sentence.format(len(used), heads, where.format(*shares, counted(verdicts)))


def _middle_and_range(shares: pd.Series) -> str:
    """Format the median, and the quantiles of 5 and 95 %."""
    low, middle, high = (number(float(shares.quantile(q)), 2) for q in (0.05, 0.5, 0.95))
    return f"{middle} ({low} to {high})"
