"""Rows of a table that could not be measured."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pandas as pd

_Measured = TypeVar("_Measured")


@dataclass(frozen=True, eq=False)
class Failure:
    """The error of a measurement.

    Attributes:
        label: the head, layer or layers whose row it was to fill.
        error: what was raised.
        change: the name of the change.
    """

    label: str
    error: Exception
    change: str = ""


def attempt(measure: Callable[[], _Measured], label: str, change: str = "") -> _Measured | Failure:
    """Return the result of ``measure``, or the failure if it raises an error of its input or of the model."""
    try:
        return measure()
    except (ValueError, RuntimeError) as error:
        return Failure(label, error, change)


def note_failures(
    table: pd.DataFrame, failures: Sequence[Failure], n_attempts: int, stacklevel: int = 3
) -> pd.DataFrame:
    """Say in ``table.attrs["failures"]`` why rows are NaN, and warn once; raise the first error if all attempts failed.

    ``stacklevel`` is that of ``warnings.warn``: 3 if this is called by a function that users call.
    """
    if not failures:
        return table
    if len(failures) == n_attempts:
        raise failures[0].error
    reasons: dict[str, str] = {}
    for failure in failures:
        reasons.setdefault(failure.label, f"{type(failure.error).__name__}: {failure.error}")
    label, reason = next(iter(reasons.items()))
    warnings.warn(
        f"{len(reasons)} of the heads or layers could not be measured, their rows are NaN: {label}: {reason} "
        '(table.attrs["failures"] lists all)',
        stacklevel=stacklevel,
    )
    table.attrs["failures"] = reasons
    return table
