"""Places for labels of the discs of a plot, where they overlap nothing at any size that the plot may have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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

_FARTHER = (0, 16, 32, 48, 64, 80, 96)
"""By how much farther a label may be than beside its disc, in pixels; the nearest places are tried first."""

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


class Place(NamedTuple):
    """The place of a label.

    Attributes:
        position: plotly's ``textposition`` if the label is beside its disc; None if it is farther away, with a line.
        offset: of its middle from that of the disc, in pixels, to the right and upwards.
    """

    position: str | None
    offset: tuple[float, float]


def label_places(labels: Sequence[tuple[str, Box]], obstacles: Sequence[Box], sizes: Sizes) -> list[Place | None]:
    """Choose a place for each label, beside its disc or as near as there is room; the first labels choose first.

    Args:
        labels: texts with their discs.
        obstacles: what no label may overlap; discs may be among them.
        sizes: the sizes that the plot may have.

    Returns:
        For each label its place; None where it would overlap an obstacle, another label or the line to one at all of
        the places that are tried, or leave the axes.
    """
    taken, words, places = list(obstacles), list[Box](), list[Place | None]()
    for text, own in labels:
        found = None
        for position, box, line in _candidates(text, own):
            free = not any(box.overlaps(other, sizes) for other in taken)
            if free and box.is_inside(sizes) and not any(line.overlaps(word, sizes) for word in words):
                found = Place(position, box.offset)
                words.append(box)
                taken += [box, line]
                break
        places.append(found)
    return places


def _candidates(text: str, own: Box) -> Iterator[tuple[str | None, Box, Box]]:
    """Yield the places of a label, the nearest first: plotly's position, its rectangle, and that of the line to it."""
    half, beside = _half_size(text), 1.25 * own.half[0] + 1  # plotly's distance: 1.25 radii and one pixel
    for farther in _FARTHER:
        for position, direction in _SIDES.items():
            near = [side * (beside + farther) for side in direction]
            middle = (near[0] + direction[0] * half[0], near[1] + direction[1] * half[1])
            line = Box(own.anchor, (near[0] / 2, near[1] / 2), (abs(near[0]) / 2, abs(near[1]) / 2))
            yield None if farther else position, Box(own.anchor, middle, half), line


def _half_size(text: str) -> tuple[float, float]:
    return len(text) * _CHARACTER / 2, _FONT / 2 + 1


def _least_distance(shares: float, pixels: float, least: float, largest: float) -> float:
    """Return the least ``|shares * size + pixels|`` over sizes from ``least`` to ``largest``."""
    ends = (shares * least + pixels, shares * largest + pixels)
    return 0.0 if min(ends) < 0 < max(ends) else min(map(abs, ends))
