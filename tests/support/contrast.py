"""The contrast of two colours (WCAG 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ENOUGH = 4.5
"""Of text, by level AA."""


def luminance(colour: Sequence[float]) -> float:
    """Relative luminance of red, green and blue from 0 to 255."""
    parts = np.array(colour[:3]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)
