"""The distances that the atlas and its panels show."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def shown_distances(distances: Iterable[Any]) -> list[int]:
    """Return those of the distances 0, 1, 2, 4, 8 … that are there.

    >>> shown_distances(range(7))
    [0, 1, 2, 4]
    """
    known = set(distances)
    return [distance for distance in (0, *(2**power for power in range(20))) if distance in known]
