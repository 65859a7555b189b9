"""What an argument must be is refused in the same words everywhere."""

from __future__ import annotations

from typing import Any


def check_integer(name: str, value: Any, least: int) -> None:
    """Refuse what is no integer, or below ``least``; True and False are none.

    Raises:
        ValueError: says what must be, and what was given.

        >>> check_integer("window", 3, 1)
        >>> check_integer("window", True, 1)
        Traceback (most recent call last):
        ValueError: window must be an integer of at least 1, got True
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
