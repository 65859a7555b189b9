"""The contrast of two colours (WCAG 2), and what a browser's filter makes of a colour."""

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


def turned(colour: Sequence[float]) -> list[float]:
    """``invert(1) hue-rotate(180deg)`` by the matrices of the specification of filters."""
    cos, sin = np.cos(np.pi), np.sin(np.pi)
    luma = np.array([[0.213, 0.715, 0.072]] * 3)
    along = np.array([[0.787, -0.715, -0.072], [-0.213, 0.285, -0.072], [-0.213, -0.715, 0.928]])
    across = np.array([[-0.213, -0.715, 0.928], [0.143, 0.140, -0.283], [-0.787, 0.715, 0.072]])
    matrix = luma + cos * along + sin * across
    return [*(matrix @ (255 - np.array(colour[:3]))).clip(0, 255)]
