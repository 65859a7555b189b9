"""Measure the sections of a report, one after another."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence

from tqdm.auto import tqdm

from tl_posdisent.page.measuring.measurement import FAILURES, Measurement, Settings
from tl_posdisent.page.measuring.panels import panel_tokens
from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.page.sections.names import SectionName
from tl_posdisent.page.sections.section import Measured, Section

_BAR = "{l_bar}{bar}| {n:.0f}/{total:.0f} passes [{elapsed}{postfix}]"


def measure_sections(
    sections: Sequence[Section], subject: Subject, settings: Settings
) -> dict[SectionName, Measurement]:
    """Measure the sections; raise ``ValueError`` if none of them can be measured."""
    measurements: dict[SectionName, Measurement] = {}
    passes = _passes(sections, subject, settings)
    if settings.progress:
        tqdm.write(_say_passes(passes, subject), file=sys.stderr)
    total = sum(passes.values())
    with tqdm(total=total, desc="report", bar_format=_BAR, disable=not settings.progress) as bar:
        for section in sections:
            bar.set_postfix_str(section.name)
            measurements[section.name] = _measure_or_refuse(section, subject, settings, measurements)
            bar.update(passes[section.name])
    if all(measurement.refused for measurement in measurements.values()):
        reason = measurements[sections[0].name].refused
        raise ValueError(f"none of the requested sections can be measured: {reason}")
    return measurements


def _passes(sections: Sequence[Section], subject: Subject, settings: Settings) -> dict[SectionName, float]:
    """Return the forward passes of all texts that each section takes."""
    n_tokens = sum(subject.lengths)
    return {section.name: section.passes(subject, settings) / n_tokens for section in sections}


def _say_passes(passes: Mapping[SectionName, float], subject: Subject) -> str:
    """Say how many forward passes the report takes, and how many of them are for each section and for the panels."""
    each = [*passes.items(), ("panels of heads", panel_tokens(subject) / sum(subject.lengths))]
    total = sum(count for _, count in each)
    listed = ", ".join(f"{name} {count:.1f}" for name, count in each)
    return f"report: about {total:.0f} forward passes of {subject.sizes()} ({listed}; a backward pass counts as two)"


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
