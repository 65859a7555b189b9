"""The names of the sections, which the command line lists without importing what measures them."""

from __future__ import annotations

from typing import Literal

SectionName = Literal[
    "additivity", "distance", "shares", "subspaces", "labels", "heads", "perturbation", "ablation", "ladder"
]
"""A section of the report."""
