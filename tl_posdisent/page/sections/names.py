"""The names of the sections, which the command line lists without importing what measures them."""

from __future__ import annotations

from typing import Final, Literal, get_args

SectionName = Literal[
    "where_or_what",
    "additivity",
    "distance",
    "shares",
    "subspaces",
    "labels",
    "heads",
    "perturbation",
    "ablation",
    "ladder",
]
"""A section of the report, in the order of the page."""
ON_REQUEST: Final = ("ablation", "ladder")
"""The sections that are measured only if they are named: they run the model for each head."""
DEFAULT: Final[tuple[SectionName, ...]] = tuple(name for name in get_args(SectionName) if name not in ON_REQUEST)
