"""Progress bars, and what an interrupted one says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm

NOTHING_KEPT = (
    "tl_posdisent keeps no results of an interrupted call. To keep those of each part, call it for a few layers or "
    "texts at a time, or use tl_posdisent.sweeps.sweep, which stores each result and continues where it was interrupted"
)
"""What an interrupted call says that keeps no results."""
SLACK = 1e-6
"""What to add to the total of a bar that counts fractions, so that rounding does not take it beyond its end."""


@contextmanager
def progress_bar(items: Any = None, *, interrupted: str = NOTHING_KEPT, **options: Any) -> Iterator[Any]:
    """Show a tqdm bar with these options; a KeyboardInterrupt in its block gets the note ``interrupted``."""
    try:
        with tqdm(items, **options) as bar:
            yield bar
    except KeyboardInterrupt as error:
        if interrupted not in getattr(error, "__notes__", ()):
            error.add_note(interrupted)
        raise
