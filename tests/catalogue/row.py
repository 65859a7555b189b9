"""What a row of the catalogue is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One bad input.

    Attributes:
        of: the public name that gets it.
        what: what is bad about it.
        call: given an empty folder of its own, gives it to the function.
        words: what the error's message must contain; none if there must be no error but a result.
        error: the error's class, exactly.
    """

    of: str
    what: str
    call: Callable[[Path], Any]
    words: tuple[str, ...]
    error: type[BaseException] = ValueError

    def __str__(self) -> str:
        return f"{self.of}: {self.what}"


def refused(of: str, what: str, call: Callable[[Path], Any], *words: str, error: type[Exception] = ValueError) -> Row:
    """A row whose call must raise, with these words in the message."""
    assert words, "an error must say something"
    return Row(of, what, call, words, error)


def gives(of: str, what: str, call: Callable[[Path], bool]) -> Row:
    """A row whose call must do what is documented: it says whether that was so."""
    return Row(of, what, call, ())
