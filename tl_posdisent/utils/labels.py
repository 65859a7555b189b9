"""Labels of heads, such as ``L16H0``, as pairs (layer, head)."""

from __future__ import annotations

import re
from typing import Any

from tl_posdisent.utils.errors import ArgumentError, brief

_LABEL = re.compile(r"L(\d+)H(\d+)")


def is_label(x: str) -> bool:
    """Say whether a text has the form of a label.

    >>> is_label("L16H0"), is_label("half")
    (True, False)
    """
    return _LABEL.fullmatch(x) is not None


def from_label(x: Any) -> Any:
    """Convert ``"L16H0"`` to ``(16, 0)``; return anything except a string unchanged.

    >>> from_label("L16H0"), from_label((16, 0))
    ((16, 0), (16, 0))
    """
    if not isinstance(x, str):
        return x
    label = _LABEL.fullmatch(x)
    if label is None:
        several = ": give each head as a string of its own" if "," in x else ""
        raise ArgumentError("heads", f'given as text must be labels such as "L16H0", got {brief(x)}{several}')
    return int(label[1]), int(label[2])
