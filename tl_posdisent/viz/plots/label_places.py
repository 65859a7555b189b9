"""Places for labels beside the discs of a plot, where they overlap nothing at any size that the plot may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_FONT, _CHARACTER = 12.0, 7.5
"""Size of plotly's text, and the width of a character, which is rounded up; in pixels."""
_SIDES = {
    "top center": (0, 1),
    "bottom center": (0, -1),
    "middle right": (1, 0),
    "middle left": (-1, 0),
    "top right": (1, 1),
    "top left": (-1, 1),
    "bottom right": (1, -1),
    "bottom left": (-1, -1),
}
"""Plotly's positions of text beside a marker, and their directions."""

Sizes = tuple[tuple[float, float], tuple[float, float]]
"""Least and largest width, least and largest height of the area inside the axes, in pixels."""


@dataclass(frozen=True)
class Box:
    """A rectangle of a fixed size in pixels, at a place that moves with the size of the plot.

    Attributes:
        anchor: a place in shares of the area inside the axes, from its lower left corner.
        offset: the middle of the rectangle, in pixels from there.
        half: half of its width and of its height, in pixels.
    """

    anchor: tuple[float, float]
    offset: tuple[float, float]
    half: tuple[float, float]

    def overlaps(self, other: Box, sizes: Sizes) -> bool:
        """Whether two rectangles overlap at one of these sizes; width and height vary independently."""
        return all(
            _least_distance(self.anchor[n] - other.anchor[n], self.offset[n] - other.offset[n], *sizes[n])
            < self.half[n] + other.half[n]
            for n in (0, 1)
        )

    def is_inside(self, sizes: Sizes) -> bool:
        """Whether the rectangle lies inside the axes at all of these sizes, which the least of them decides."""
        return all(
            self.half[n] <= self.anchor[n] * least + self.offset[n] <= least - self.half[n]
            for n, (least, _) in enumerate(sizes)
        )


def disc(place: tuple[float, float], diameter: float) -> Box:
    """Return the square around a disc."""
    return Box(place, (0.0, 0.0), (diameter / 2, diameter / 2))


def corner_word(corner: tuple[int, int], text: str) -> Box:
    """Return the rectangle of a word in a corner of the area inside the axes, (0, 0) for the lower left one."""
    return corner_box(corner, _half_size(text))


def corner_box(corner: tuple[int, int], half: tuple[float, float]) -> Box:
    """Return a rectangle in a corner of the area inside the axes, by half of its width and of its height."""
    inwards = [1 - 2 * side for side in corner]
    return Box((float(corner[0]), float(corner[1])), (inwards[0] * half[0], inwards[1] * half[1]), half)


def label_positions(labels: Sequence[tuple[str, Box]], obstacles: Sequence[Box], sizes: Sizes) -> list[str | None]:
    """Choose plotly's ``textposition`` for each label beside its disc; the first labels choose first.

    Args:
        labels: texts with their discs.
        obstacles: what no label may overlap; its own disc may be among them.
        sizes: the sizes that the plot may have.

    Returns:
        For each label its position; None where it would overlap an obstacle or another label on every side, or leave
        the axes.
    """
    taken, positions = list(obstacles), list[str | None]()
    for text, own in labels:
        others = [box for box in taken if box is not own]
        beside = {side: _beside(own, text, direction) for side, direction in _SIDES.items()}
        free = (
            side
            for side, box in beside.items()
            if box.is_inside(sizes) and not any(box.overlaps(other, sizes) for other in others)
        )
        positions.append(next(free, None))
        if (side := positions[-1]) is not None:
            taken.append(beside[side])
    return positions


def _beside(point: Box, label: str, direction: tuple[int, int]) -> Box:
    """Return the rectangle of a label as plotly places it: 1.25 radii and one pixel from the middle of the disc."""
    half, away = _half_size(label), 1.25 * point.half[0] + 1
    return Box(point.anchor, (direction[0] * (away + half[0]), direction[1] * (away + half[1])), half)


def _half_size(text: str) -> tuple[float, float]:
    return len(text) * _CHARACTER / 2, _FONT / 2 + 1


def _least_distance(shares: float, pixels: float, least: float, largest: float) -> float:
    """Return the least ``|shares * size + pixels|`` over sizes from ``least`` to ``largest``."""
    ends = (shares * least + pixels, shares * largest + pixels)
    return 0.0 if min(ends) < 0 < max(ends) else min(map(abs, ends))
