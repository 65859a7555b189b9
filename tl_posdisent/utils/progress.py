"""Progress bars, and what an interrupted one says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tqdm.auto import tqdm

_KEEPING = (
    "tl_posdisent keeps no results of an interrupted call. To keep those of each part, call it for a few layers or "
    "texts at a time, or use tl_posdisent.sweeps.sweep, which stores each part and continues where it was interrupted"
)


_around: ContextVar[Callable[[float], Any] | None] = ContextVar("around", default=None)


@contextmanager
def counted(amount: float, move: Callable[[float], Any]) -> Iterator[None]:
    """Pass on what a hidden bar in this block counts: ``move`` gets a part of ``amount`` at each of its updates.

    >>> moved = []
    >>> with counted(10, moved.append), progress_bar(total=4, disable=True) as bar:
    ...     bar.update()
    ...     bar.update(3)
    >>> moved
    [2.5, 7.5]
    """
    token = _around.set(lambda share: move(amount * share))
    try:
        yield
    finally:
        _around.reset(token)


class _Bar(tqdm):  # type: ignore[type-arg]
    """A bar that tells the block around it about its updates, by the total that it has at first."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.around, self.whole = _around.get(), self.total

    def update(self, n: float | None = 1) -> Any:
        if self.around is not None and self.whole:
            self.around((n or 0) / self.whole)
        return super().update(n)


@contextmanager
def progress_bar(items: Any = None, **options: Any) -> Iterator[Any]:
    """Show a tqdm bar; a KeyboardInterrupt in its block gets a message about how to keep partial results."""
    try:
        with _Bar(items, **options) as bar:
            yield bar
    except KeyboardInterrupt as error:
        if _KEEPING not in getattr(error, "__notes__", ()):
            error.add_note(_KEEPING)
        raise
