"""Progress bars, and what an interrupted one says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm

_KEEPING = (
    "tl_posdisent keeps no results of an interrupted call. To keep those of each part, call it for a few layers or "
    "texts at a time, or use tl_posdisent.sweeps.sweep, which stores each result and continues where it was interrupted"
)


SLACK = 1e-6
"""What to add to the total of a bar that counts fractions, so that rounding does not take it beyond its end."""


@contextmanager
def progress_bar(items: Any = None, **options: Any) -> Iterator[Any]:
    """Show a tqdm bar; a KeyboardInterrupt in its block gets a message about how to keep partial results."""
    try:
        with tqdm(items, **options) as bar:
            yield bar
    except KeyboardInterrupt as error:
        if _KEEPING not in getattr(error, "__notes__", ()):
            error.add_note(_KEEPING)
        raise
