"""Format numbers and lists for the sentences and table cells of a report."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

MISSING = "–"
"""The placeholder for a missing number."""
NO_LABEL = "none"
"""The label of a head that has none."""


def number(x: float | int, digits: int = 3) -> str:
    """Format a number with ``digits`` decimals and a true minus sign.

    >>> number(-0.1234), number(-0.0001), number(float("nan"))
    ('−0.123', '0.000', '–')
    """
    if not math.isfinite(x):
        return MISSING
    return f"{round(x, digits) + 0.0:.{digits}f}".replace("-", "−")


def signed(x: float | int, digits: int = 3) -> str:
    """Format a change, with its sign."""
    text = number(x, digits)
    return f"+{text}" if x > 0 and text.strip("0.") else text


def unbroken(text: str) -> str:
    """Keep numbers and their percent signs in one line.

    >>> unbroken("59 % of 40 heads") == "59\\xa0% of 40 heads"
    True
    """
    return re.sub(r"(?<=\d) %", "\xa0%", text)


def numbers(values: Sequence[int]) -> str:
    """Format a list of layers or heads: ``0 to 4``, or ``0, 3, 5``."""
    if len(values) > 2 and list(values) == list(range(values[0], values[-1] + 1)):
        return f"{values[0]} to {values[-1]}"
    return ", ".join(map(str, values))


def counted(numbers_by_kind: Mapping[Any, int]) -> str:
    """``3 where, 1 what``."""
    return ", ".join(f"{count} {kind}" for kind, count in numbers_by_kind.items())


def label_words(labels: pd.Series) -> pd.Series:
    """Write labels of ``head_labels`` in words."""
    return labels.str.replace("_", " ").str.replace("+", " + ", regex=False).replace("", NO_LABEL)
