"""Measure the sections of a report, one after another."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from tqdm.auto import tqdm

from tl_posdisent.page.measuring.measurement import FAILURES, Measurement, Settings
from tl_posdisent.page.measuring.panels import panel_tokens
from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.page.sections.names import SectionName
from tl_posdisent.page.sections.section import Measured, Section

_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


def measure_sections(
    sections: Sequence[Section], subject: Subject, settings: Settings
) -> dict[SectionName, Measurement]:
    """Measure the sections; raise ``ValueError`` if none of them can be measured."""
    measurements: dict[SectionName, Measurement] = {}
    if settings.progress:
        tqdm.write(say_passes(sections, subject, settings), file=sys.stderr)
    with tqdm(total=len(sections), desc="report", bar_format=_BAR, disable=not settings.progress) as bar:
        for section in sections:
            bar.set_postfix_str(section.name)
            measurements[section.name] = _measure_or_refuse(section, subject, settings, measurements)
            bar.update()
    if all(measurement.refused for measurement in measurements.values()):
        reason = measurements[sections[0].name].refused
        raise ValueError(f"none of the requested sections can be measured: {reason}")
    return measurements


def say_passes(sections: Sequence[Section], subject: Subject, settings: Settings) -> str:
    """Say how many forward passes of all texts the report takes, and how many of them are for each section."""
    n_tokens = sum(subject.lengths)
    passes = {section.name: section.passes(subject, settings) / n_tokens for section in sections}
    total = sum(passes.values()) + panel_tokens(subject) / n_tokens
    each = ", ".join(f"{name} {count:.1f}" for name, count in passes.items())
    return f"report: about {total:.0f} forward passes of {subject.sizes()} ({each}; a backward pass counts as two)"


def _measure_or_refuse(section: Section, subject: Subject, settings: Settings, measured: Measured) -> Measurement:
    """Measure a section, or return why it failed: an unsuitable input (``ValueError``) or a failed computation."""
    try:
        return section.measure(subject, settings, measured)
    except ValueError as error:
        return Measurement(refused=str(error))
    except FAILURES as error:
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"the section {section.name} could not be measured: {reason}", stacklevel=4)
        return Measurement(refused=reason, failed=True)
