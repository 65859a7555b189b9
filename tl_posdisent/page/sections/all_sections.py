"""All sections of the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, get_args

from markupsafe import Markup

from tl_posdisent.page.measuring.measurement import Measurement
from tl_posdisent.page.sections.ablation import ABLATION
from tl_posdisent.page.sections.additivity import ADDITIVITY
from tl_posdisent.page.sections.distance import DISTANCE
from tl_posdisent.page.sections.exhibits import EXHIBITS
from tl_posdisent.page.sections.labels import LABELS
from tl_posdisent.page.sections.ladder import LADDER
from tl_posdisent.page.sections.names import SectionName
from tl_posdisent.page.sections.needs import NEEDS
from tl_posdisent.page.sections.perturbation import PERTURBATION
from tl_posdisent.page.sections.section import Section
from tl_posdisent.page.sections.shares import SHARES
from tl_posdisent.page.sections.subspaces import SUBSPACES

_SECTIONS: Final = (
    ABLATION,
    ADDITIVITY,
    DISTANCE,
    EXHIBITS,
    LABELS,
    LADDER,
    NEEDS,
    PERTURBATION,
    SHARES,
    SUBSPACES,
)
_BY_NAME: Final = {section.name: section for section in _SECTIONS}
SECTIONS: Final[dict[SectionName, Section]] = {name: _BY_NAME[name] for name in get_args(SectionName)}
"""By their names, in the order of the page."""


def verdict_sentences(measurements: Mapping[SectionName, Measurement]) -> list[list[Markup]]:
    """Return the sentences of each section that was measured, in the order of the page."""
    measured = {name: measurement for name, measurement in measurements.items() if measurement.refused is None}
    return [section.sentences(measured[name]) for name, section in SECTIONS.items() if name in measured]
