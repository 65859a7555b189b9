"""A section of the report as a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup

from tl_posdisent.page.measuring.measurement import Measurement, Settings
from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.page.sections.names import SectionName

Measured = Mapping[SectionName, Measurement]
"""The measurements of the sections before, for one that needs a table of theirs."""


class Content(NamedTuple):
    """What a section shows: its HTML, and the scripts of its widgets."""

    html: Markup
    scripts: tuple[str, ...] = ()


def no_sentences(measurement: Measurement) -> list[Markup]:
    """Add nothing to the verdict."""
    return []


@dataclass(frozen=True)
class Section:
    """A section of the report.

    Attributes:
        name: its name in ``report(sections=...)`` and its place in the page.
        heading: its heading.
        measure: runs the experiment; raises ``ValueError`` where the model or the text is not suitable.
        passes: tokens that ``measure`` runs through all layers; a backward pass counts as two.
        show: makes its figures and tables from its measurement.
        sentences: what it adds to the verdict of the report, the main one first.
    """

    name: SectionName
    heading: str
    measure: Callable[[Subject, Settings, Measured], Measurement]
    passes: Callable[[Subject, Settings], float]
    show: Callable[[Subject, Measurement], Content]
    sentences: Callable[[Measurement], list[Markup]] = no_sentences
