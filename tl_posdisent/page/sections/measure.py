"""Measure the sections of a report, one after another."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from tqdm.auto import tqdm

from tl_posdisent.page.measuring.measurement import FAILURES, Measurement, Settings
from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.page.sections.names import SectionName
from tl_posdisent.page.sections.section import Measured, Section

_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


def measure_sections(
    sections: Sequence[Section], subject: Subject, settings: Settings
) -> dict[SectionName, Measurement]:
    """Measure the sections; raise ``ValueError`` if none of them can be measured."""
    measurements: dict[SectionName, Measurement] = {}
    with tqdm(total=len(sections), desc="report", bar_format=_BAR, disable=not settings.progress) as bar:
        for section in sections:
            bar.set_postfix_str(section.name)
            measurements[section.name] = _measure_or_refuse(section, subject, settings, measurements)
            bar.update()
    if all(measurement.refused for measurement in measurements.values()):
        reason = measurements[sections[0].name].refused
        raise ValueError(f"none of the requested sections can be measured: {reason}")
    return measurements


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
