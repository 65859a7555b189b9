"""How results show themselves: a table in a notebook, and figures by ``plot()`` and ``show()``.

Results are made in folders below that of figures, so the package's ``__init__`` provides the figures here; they are
imported when a result is first drawn.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

_ROWS = 20
_provided: list[Callable[[], Any]] = []


def provide_figures(viz: Callable[[], Any]) -> None:
    """Say where figures come from: a function that returns the namespace with ``plot_distance`` and the others."""
    _provided[:] = [viz]


def figure_function(name: str) -> Callable[..., Any]:
    """The public function of this name that draws a figure or a widget."""
    (viz,) = _provided
    found: Callable[..., Any] = getattr(viz(), name)
    return found


class HasTable:
    """A result with ``to_frame()``: notebooks show its first line and its table."""

    def to_frame(self) -> Any:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        table = self.to_frame()
        first = html.escape(repr(self).splitlines()[0])
        more = (
            f"<p>The first {_ROWS} of {len(table)} rows of <code>to_frame()</code>.</p>" if len(table) > _ROWS else ""
        )
        return f"<p>{first}</p>{table.head(_ROWS).round(3).to_html(index=False)}{more}"
