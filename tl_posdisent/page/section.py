"""The one form of all sections: what is measured, and the sentences, figures and table that show it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pandas as pd
import plotly.graph_objects as go
from markupsafe import Markup
from tqdm.auto import tqdm

from tl_posdisent.experiments.measuring.random_copies import random_copies
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.page.markup import figure, render, table
from tl_posdisent.page.subject import POSITIONS, TOKENS, Subject
from tl_posdisent.utils.tables import HEAD

FAILURES = (ValueError, RuntimeError, MemoryError)
"""What a computation may raise without ending the report."""
_MISSING = "Not measured: "


class Settings(NamedTuple):
    """What measurements need beside the model and its texts.

    Attributes:
        seed: first seed of random copies and of perturbations.
        copies: number of random copies of the model, the baseline.
        std: standard deviation of their weights.
        progress: show progress bars.
    """

    seed: int
    copies: int
    std: float
    progress: bool

    @property
    def copy_seeds(self) -> range:
        return range(self.seed, self.seed + self.copies)


@dataclass
class Measured:
    """The measurement of a section.

    Attributes:
        read: the model, and what was read of the texts.
        trained: the table of the model; None if it could not be measured.
        copies: the tables of random copies, with a column ``seed``.
        notes: what could not be measured, and why.
    """

    read: Subject
    trained: pd.DataFrame | None = None
    copies: list[pd.DataFrame] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def random(self) -> pd.DataFrame | None:
        """The tables of all random copies, one below the other; None without any."""
        return pd.concat(self.copies, ignore_index=True) if self.copies else None


class Shown(NamedTuple):
    """What a section shows.

    Attributes:
        sentences: computed from the measurement, the main one first.
        figures: plotly figures with their captions.
        table: with its caption.
        titles: of the columns of the table, where they differ from their names.
        digits: decimals of its columns, where they are not 3.
        table_first: whether the table is the answer, above the figures.
    """

    sentences: Sequence[str] = ()
    figures: Sequence[tuple[go.Figure, str]] = ()
    table: tuple[pd.DataFrame, str] | None = None
    titles: Mapping[str, str] = {}
    digits: Mapping[str, int] = {}
    table_first: bool = False


Measure = Callable[[Subject, Settings], pd.DataFrame]


class Section(NamedTuple):
    """A section of the report.

    Attributes:
        heading: its heading.
        about: how it is measured, in plain text.
        measure: runs an experiment; raises ``ValueError`` where the model or the text is not suitable.
        show: makes sentences, figures and a table of the tables of the model and of all random copies.
        measure_copy: measures a random copy; None for a section without this baseline.
        beside_copies: makes the model's table of its measures and those of all random copies, if any; None where the
            table is what was measured.
        positions, tokens: the most that is read of each text, and of all texts together.
        closed: whether all but the first sentence is closed at first, as the atlas and its panels show the same.
    """

    heading: str
    about: str
    measure: Measure
    show: Callable[[pd.DataFrame, pd.DataFrame | None], Shown]
    measure_copy: Measure | None = None
    beside_copies: Callable[[pd.DataFrame, pd.DataFrame | None], pd.DataFrame] | None = None
    positions: int = POSITIONS
    tokens: int = TOKENS
    closed: bool = False


def measure_sections(sections: Mapping[str, Section], subject: Subject, settings: Settings) -> dict[str, Measured]:
    """Measure the sections, and then random copies of the model, one in memory at a time."""
    measured: dict[str, Measured] = {}
    with_baseline = [name for name, section in sections.items() if section.measure_copy]
    seeds = settings.copy_seeds if with_baseline else range(0)
    n_steps = len(sections) + len(seeds) * len(with_baseline)
    with tqdm(total=n_steps, desc="report", unit="section", disable=not settings.progress) as bar:
        for name, section in sections.items():
            bar.set_postfix_str(name)
            measured[name] = _measure(section, subject, settings)
            bar.update()
        _warn_of_missing(measured)
        for seed, copy in random_copies(subject.model, seeds, settings.std):
            for name in with_baseline:
                bar.set_postfix_str(f"{name}, random weights")
                _add_copy(measured[name], sections[name], copy, seed, settings)
                bar.update()
            del copy  # free its memory before the next
        for name, section in sections.items():
            one = measured[name]
            if section.beside_copies and one.trained is not None:
                one.trained = section.beside_copies(one.trained, one.random)
    return measured


def _warn_of_missing(measured: Mapping[str, Measured]) -> None:
    """Warn of sections that could not be measured, with the reasons; raise if there are no others."""
    missing = {name: one.notes[0].removeprefix(_MISSING) for name, one in measured.items() if one.trained is None}
    if len(missing) == len(measured):
        raise ValueError(f"none of the requested sections can be measured: {next(iter(missing.values()))}")
    if missing:
        of_reason = {why: ", ".join(name for name in missing if missing[name] == why) for why in missing.values()}
        reasons = "; ".join(f"{names}: {why}" for why, names in of_reason.items())
        warnings.warn(f"sections of the report were not measured: {reasons}", stacklevel=5)


def _measure(section: Section, subject: Subject, settings: Settings) -> Measured:
    """Measure a section, or note why that failed: an unsuitable input (``ValueError``) or a failed computation."""
    measured = Measured(subject.cut(section.positions, section.tokens))
    try:
        measured.trained = section.measure(measured.read, settings)
    except FAILURES as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        measured.notes.append(f"{_MISSING}{kind}{error}")
    else:
        failures = measured.trained.attrs.get("failures", {}).items()
        measured.notes += [f"Not measured: {part}: {reason}." for part, reason in failures]
    return measured


def _add_copy(measured: Measured, section: Section, reading: ModelReading, seed: int, settings: Settings) -> None:
    """Measure a random copy as well, unless the model itself could not be measured."""
    if section.measure_copy is None or measured.trained is None:
        return
    try:
        table = section.measure_copy(replace(measured.read, reading=reading), settings)
    except FAILURES as error:
        measured.notes.append(f"Not measured with random weights of seed {seed}: {type(error).__name__}: {error}.")
    else:
        measured.copies.append(table.assign(seed=seed))


def render_section(
    name: str, section: Section, measured: Measured, subject: Subject, linked: Collection[str] = ()
) -> Markup:
    """Render a section; without a measurement, its heading and the reason.

    Args:
        linked: the labels of the heads that have a panel, to which tables lead.
    """
    shown = Shown() if measured.trained is None else section.show(measured.trained, measured.random)
    parts = [what for what, there in (("figure", shown.figures), ("table", shown.table)) if there]
    whole = "" if measured.read.tokens.shape == subject.tokens.shape else f", of {subject.sizes()}"
    return render(
        "section",
        id=name,
        heading=section.heading,
        closed=section.closed and " and ".join(parts).capitalize(),
        sentences=shown.sentences,
        figures=[figure(drawn, of_figure) for drawn, of_figure in shown.figures],
        table=None if shown.table is None else _table(name, shown, subject, linked),
        table_first=shown.table_first,
        about=section.about,
        read=None if measured.trained is None else f"Read: {measured.read.sizes()}{whole}.",
        notes=measured.notes,
    )


def _table(name: str, shown: Shown, subject: Subject, linked: Collection[str]) -> Markup:
    assert shown.table is not None
    rows, caption = shown.table
    rows = with_attention(rows, subject.attention)
    return table(name, caption, rows, shown.titles, shown.digits, linked=linked)


def with_attention(rows: pd.DataFrame, attention: Mapping[int, str]) -> pd.DataFrame:
    """Insert the column ``attention`` behind layer and head, if the model has sliding windows."""
    if not attention or "layer" not in rows:
        return rows
    place = 2 if "head" in rows else 1
    rows = rows.copy()
    rows.insert(place, "attention", [attention[int(layer)] for layer in rows["layer"]])
    return rows


def by_head(measured: pd.DataFrame) -> pd.DataFrame:
    """Average over texts and seeds: one row for each layer and head."""
    return measured.drop(columns=["batch", "seed"], errors="ignore").groupby(HEAD, as_index=False).mean()
