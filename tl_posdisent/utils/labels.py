"""Labels of heads, such as ``L16H0``, as pairs (layer, head)."""

from __future__ import annotations

import re
from typing import Any

from tl_posdisent.utils.errors import ArgumentError, brief


def from_label(x: Any) -> Any:
    """Convert ``"L16H0"`` to ``(16, 0)``; return anything except a string unchanged.

    >>> from_label("L16H0"), from_label((16, 0))
    ((16, 0), (16, 0))
    """
    if not isinstance(x, str):
        return x
    label = re.fullmatch(r"L(\d+)H(\d+)", x)
    if label is None:
        raise ArgumentError("heads", f'given as text must be labels such as "L16H0", got {brief(x)}')
    return int(label[1]), int(label[2])
