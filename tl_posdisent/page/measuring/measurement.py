"""The measurement of one section of a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from tl_posdisent.page.measuring.subject import Subject

HEAD = ["layer", "head"]
FAILURES = (ValueError, RuntimeError, MemoryError)
"""What a computation may raise without ending the report."""


@dataclass(frozen=True)
class Settings:
    """What measurements need beside the model and its texts.

    Attributes:
        seed: first seed of random copies and of perturbations.
        copies: number of random copies of the model, the baseline.
        std: standard deviation of their weights.
        progress: show the bars of sections that run the model for each head.
    """

    seed: int
    copies: int
    std: float
    progress: bool

    @property
    def copy_seeds(self) -> range:
        return range(self.seed, self.seed + self.copies)


@dataclass(frozen=True)
class Measurement:
    """The measurement of a section, or the reason for its absence.

    Attributes:
        trained: a table, or ``Exhibits`` for the section ``heads``; None if refused.
        random: the same table for all random copies (for ``where_or_what`` one), with a column ``seed``; None without.
        refused: why there is no measurement: the model does not support it, or (``failed``) there was an error.
        note: what was left out of the measurement, and why.
        read: the texts that were measured.
        sample: ``40 of 270 heads``, if the model was run for some of the heads only.
    """

    trained: Any = None
    random: pd.DataFrame | None = None
    refused: str | None = None
    failed: bool = False
    note: str | None = None
    read: Subject | None = None
    sample: str | None = None


def by_head(table: pd.DataFrame) -> pd.DataFrame:
    """Average over texts and seeds: one row for each layer and head."""
    return table.drop(columns=["batch", "seed"], errors="ignore").groupby(HEAD, as_index=False).mean()


def join_notes(*notes: str | None) -> str | None:
    """Join the notes that there are; None without any."""
    return " ".join(filter(None, notes)) or None


def failures_note(table: pd.DataFrame) -> str | None:
    """State which parts of an experiment failed, by ``attrs["failures"]`` of its table; None if none did."""
    failures = table.attrs.get("failures", {})
    reasons = "; ".join(f"{label}: {reason}" for label, reason in failures.items())
    return f"Not measured: {reasons}." if reasons else None
