"""Errors about one argument, with the argument's name as an attribute."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class ArgumentError(ValueError):
    """An invalid argument: its name, and then what is needed, what was given and what to do.

    The message is ``argument`` followed by ``problem``. Callers that use other names read the two attributes
    (``naming``).

    >>> error = ArgumentError("length", "must be an integer of at least 1, got 0")
    >>> error.argument, str(error)
    ('length', 'length must be an integer of at least 1, got 0')
    """

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(argument, problem)
        self.argument, self.problem = argument, problem

    def __str__(self) -> str:
        return f"{self.argument} {self.problem}"


@contextmanager
def naming(**names: str) -> Iterator[None]:
    """Give errors about arguments in the block the names that the caller's own arguments have.

    >>> with naming(tokens="heldout"):
    ...     raise ArgumentError("tokens", "must have two positions")
    Traceback (most recent call last):
    tl_posdisent.utils.errors.ArgumentError: heldout must have two positions
    """
    try:
        yield
    except ArgumentError as error:
        if type(error) is not ArgumentError or error.argument not in names:
            raise
        raise ArgumentError(names[error.argument], error.problem) from error


def brief(value: Any) -> str:
    """Return the repr of a value for an error: at most 120 characters, and paths as the strings that users gave.

    >>> from pathlib import PurePosixPath
    >>> brief([PurePosixPath("a/b.txt"), 1]), len(brief(list(range(1000))))
    ("['a/b.txt', 1]", 120)
    """
    try:
        text = repr(value)
    except ValueError:  # Python prints no integers of more than 4300 digits
        return f"{type(value).__name__} of too many digits to print"
    text = re.sub(r"\b(?:Pure)?(?:Posix|Windows)?Path\(('[^']*'|\"[^\"]*\")\)", r"\1", text)
    return text if len(text) <= 120 else text[:117] + "..."
