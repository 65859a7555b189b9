"""Values of a parameter for the slow lane."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

import tl_posdisent as tp

LONG = (
    *(tp.attention_ladder, tp.component_patching, tp.position_patching, tp.head_effects),
    *(tp.head_labels, tp.describe_head, tp.where_or_what, tp.compare_heads, tp.report),
)
"""Experiments that run the model for each head, or fit its heads: what all experiments share is slow for them."""


def slow(values: Iterable[Any]) -> list[Any]:
    """The same values for ``parametrize``, each with the mark `slow`; a tuple has a value for each parameter."""
    several = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*value, marks=pytest.mark.slow) for value in several]


def by_cost(functions: Iterable[Callable[..., Any]]) -> list[Any]:
    """Functions for ``parametrize``, by name; those of `LONG` are slow."""
    return [pytest.param(f, id=f.__name__, marks=[pytest.mark.slow] * (f in LONG)) for f in functions]
