"""All sections of the report."""

from __future__ import annotations

from collections.abc import Mapping

from markupsafe import Markup

from tl_posdisent.page.measuring.measurement import Measurement
from tl_posdisent.page.sections.ablation import ABLATION
from tl_posdisent.page.sections.additivity import ADDITIVITY
from tl_posdisent.page.sections.distance import DISTANCE
from tl_posdisent.page.sections.exhibits import EXHIBITS
from tl_posdisent.page.sections.labels import LABELS
from tl_posdisent.page.sections.ladder import LADDER
from tl_posdisent.page.sections.names import SectionName
from tl_posdisent.page.sections.perturbation import PERTURBATION
from tl_posdisent.page.sections.section import Section
from tl_posdisent.page.sections.shares import SHARES
from tl_posdisent.page.sections.subspaces import SUBSPACES

SECTIONS: dict[SectionName, Section] = {
    section.name: section
    for section in (
        ADDITIVITY,
        DISTANCE,
        SHARES,
        SUBSPACES,
        LABELS,
        EXHIBITS,
        PERTURBATION,
        ABLATION,
        LADDER,
    )
}
"""By their names, in the order of the page."""

_VERDICT = (ADDITIVITY, LADDER, ABLATION, LABELS, SHARES, PERTURBATION)
"""The sections of which the verdict speaks, the main ones first."""


def verdict_sentences(measurements: Mapping[SectionName, Measurement]) -> list[list[Markup]]:
    """Return the sentences of each section that was measured, in the order of the verdict."""
    measured = {name: measurement for name, measurement in measurements.items() if measurement.refused is None}
    return [section.sentences(measured[section.name]) for section in _VERDICT if section.name in measured]
