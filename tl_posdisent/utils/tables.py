"""Result tables: index columns named after the axes of TransformerLens's tensors, and notebook display."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import pandas as pd

HEAD = ["layer", "head"]
"""The columns of a table that name a head."""


def index_columns(
    shape: Sequence[int], *, pooled: bool = False, repeat: int = 1, layers: Sequence[int] | None = None
) -> dict[str, list[int]]:
    """Return columns with the leading index of flattened values.

    One axis is ``head``, two are ``batch`` and ``head``; more are ``axis_0``, ``axis_1`` …. With ``layers``, the axis
    before ``head`` is ``layer`` and has these numbers. With ``pooled``, ``shape`` lacks the first axis of the scores.
    Each index is repeated ``repeat`` times.

        >>> index_columns((2, 2))
        {'batch': [0, 0, 1, 1], 'head': [0, 1, 0, 1]}
    """
    n = len(shape) + pooled
    known = ["batch", "head"] if layers is None else ["batch", "layer", "head"]
    names = known[len(known) - n :] if n <= len(known) else [f"axis_{i}" for i in range(n)]
    names = names[pooled:]
    ranges: list[Any] = [layers if name == "layer" else range(size) for name, size in zip(names, shape, strict=True)]
    index: Any = pd.MultiIndex.from_product([*ranges, range(repeat)])
    return {name: index.get_level_values(n).tolist() for n, name in enumerate(names)}


def number_heads(table: pd.DataFrame, heads: Sequence[int]) -> pd.DataFrame:
    """Replace the numbers 0, 1, 2 … in the column ``head`` by those of some heads.

    >>> number_heads(pd.DataFrame({"head": [0, 1, 0], "r": [0.5, 0.25, 1.0]}), [3, 7])["head"].tolist()
    [3, 7, 3]
    """
    return table.assign(head=table["head"].map(dict(enumerate(heads))))


def with_ends(table: pd.DataFrame, first: Sequence[str], last: Sequence[str]) -> pd.DataFrame:
    """Move columns to the ends of a table, as far as it has them, and keep the order of those between.

    pandas prints the ends of a wide table and elides its middle: three columns of either end on a usual screen. So a
    table begins with what names its rows, ends with its answer, and has errors, counts and conditions between.

    >>> list(with_ends(pd.DataFrame(columns=["r", "layer", "head", "n"]), ["layer", "head"], ["r", "r_random"]))
    ['layer', 'head', 'n', 'r']
    """
    between = [name for name in table.columns if name not in {*first, *last}]
    return table[[name for name in (*first, *between, *last) if name in table.columns]]


_SHOWN_ROWS = 20  # that a notebook shows


class HasTable:
    """A result with ``to_frame()``: notebooks show its first line and its table."""

    def to_frame(self) -> Any:
        raise NotImplementedError

    def _shown_frame(self) -> Any:
        """Return the table that a notebook shows."""
        return self.to_frame()

    def _repr_html_(self) -> str:
        table = self._shown_frame()
        first = html.escape(repr(self).splitlines()[0])
        more = (
            f"<p>The first {_SHOWN_ROWS} of {len(table)} rows of <code>to_frame()</code>.</p>"
            if len(table) > _SHOWN_ROWS
            else ""
        )
        return f"<p>{first}</p>{table.head(_SHOWN_ROWS).round(3).to_html(index=False)}{more}"
