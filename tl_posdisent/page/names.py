"""The names of the sections, which the command line lists without importing what measures them."""

from __future__ import annotations

from typing import Final, Literal, get_args

SectionName = Literal["where_or_what", "additivity", "distance", "shares", "labels", "perturbation", "ablation"]
"""A section of the report, in the order of the page."""
SECTION_NAMES: Final[tuple[SectionName, ...]] = get_args(SectionName)
ON_REQUEST: Final = "ablation"
"""The section that is measured only if it is named: it runs the model once for each head."""
