"""Bad inputs over the whole public interface: a table of rows, each with its documented error or result.

``rows()`` gathers them from the files beside this one; ``test_catalogue.py`` goes through them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .row import Row

FILES = ("scores", "vectors", "tokens", "models", "interventions", "questions", "pictures", "synthetic", "files")


def rows() -> list[Row]:
    """All rows, in the order of the files."""
    return [row for name in FILES for row in importlib.import_module(f"catalogue.{name}").ROWS]
