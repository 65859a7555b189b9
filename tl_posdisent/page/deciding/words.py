"""Format numbers and lists for the sentences and table cells of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from markupsafe import Markup

from tl_posdisent.utils.words import plural

MISSING = "–"
"""The placeholder for a missing number."""
NO_LABEL = "none"
"""The label of a head that has none."""


def number(x: float | int, digits: int = 3) -> str:
    """Format a number with ``digits`` decimals and a true minus sign."""
    if not math.isfinite(x):
        return MISSING
    return f"{round(x, digits) + 0.0:.{digits}f}".replace("-", "−")


def signed(x: float | int, digits: int = 3) -> str:
    """Format a change, with its sign."""
    text = number(x, digits)
    return f"+{text}" if x > 0 and text.strip("0.") else text


def are(n: int) -> str:
    """``1 is``, ``5 are``."""
    return plural(n, "is", "are")


def numbers(values: Sequence[int]) -> str:
    """Format a list of layers or heads: ``0 to 4``, or ``0, 3, 5``."""
    if len(values) > 2 and list(values) == list(range(values[0], values[-1] + 1)):
        return f"{values[0]} to {values[-1]}"
    return ", ".join(map(str, values))


def label_words(labels: pd.DataFrame) -> pd.DataFrame:
    """Return a table of ``head_labels`` with each ``label`` in words, or None for a head without one."""
    words = labels["label"].str.replace("_", " ").str.replace("+", " + ", regex=False)
    return labels.assign(label=words.where(words != "", None))


def counted(numbers_by_kind: Mapping[Any, int]) -> Markup:
    """``3 <em>distance</em>, 1 <em>static</em>``."""
    return Markup(", ").join(Markup("{} <em>{}</em>").format(count, kind) for kind, count in numbers_by_kind.items())
