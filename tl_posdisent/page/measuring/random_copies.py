"""The random-weights baseline of a section."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pandas as pd

from tl_posdisent.models.loading.random_init import random_control
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.page.measuring.measurement import FAILURES, Measurement, Settings, failures_note, join_notes
from tl_posdisent.page.measuring.subject import Subject


def measure_copies(
    measure_table: Callable[[Subject], pd.DataFrame], subject: Subject, settings: Settings
) -> tuple[pd.DataFrame | None, str | None]:
    """Measure random copies of the model, one in memory at a time.

    Returns:
        The tables of the copies with a column ``seed``, None without any; and a note on copies that failed.
    """
    if not settings.copies:
        return None, None
    tables: list[pd.DataFrame] = []
    notes: list[str] = []
    copies = random_control(subject.model, settings.copy_seeds, std=settings.std)
    for seed, copy in zip(settings.copy_seeds, copies, strict=True):
        untrained = replace(subject, reading=read_model(copy))
        try:
            tables.append(measure_table(untrained).assign(seed=seed))
        except FAILURES as error:
            notes.append(f"Not measured with random weights of seed {seed}: {type(error).__name__}: {error}.")
        del copy, untrained  # free their memory before the next
    return pd.concat(tables, ignore_index=True) if tables else None, join_notes(*notes)


def with_baseline(
    table: pd.DataFrame, measure_table: Callable[[Subject], pd.DataFrame], subject: Subject, settings: Settings
) -> Measurement:
    """Return the measurement of a section: the table of the model, and that of its random copies."""
    random, note = measure_copies(measure_table, subject, settings)
    return Measurement(table, random, note=join_notes(failures_note(table), note), read=subject)


def measure_subject(experiment: Callable[..., pd.DataFrame], subject: Subject) -> pd.DataFrame:
    """Run an experiment on all texts, in the layers and heads that were asked for."""
    return experiment(
        subject.reading,
        subject.tokens,
        attention_mask=subject.mask,
        layers=subject.asked_layers,
        heads=subject.asked_heads,
        progress=False,
    )


def measure_with_baseline(experiment: Callable[..., pd.DataFrame], subject: Subject, settings: Settings) -> Measurement:
    """Run an experiment on all texts, in the layers and heads that were asked for, and with random weights."""
    measure_table = partial(measure_subject, experiment)
    return with_baseline(measure_table(subject), measure_table, subject, settings)
