"""Tables on the screen: as wide as it is, or as wide as they are where stdout goes to a file or a pipe."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_HEADS_SHOWN = 12
_UNCUT = 10_000  # columns
_MANY = 1000  # rows, from which on the looks of a table would take seconds


def screen() -> Console:
    """Where results go: stdout."""
    if sys.stdout.isatty():
        return Console()
    return Console(width=_UNCUT)


def line(text: str) -> None:
    """A line of results; square brackets are just that."""
    screen().print(escape(text), soft_wrap=True, highlight=sys.stdout.isatty())


def number(value: Any, digits: int = 2) -> str:
    """
    >>> number(0.126), number(-0.001), number(3), number("bridge"), number(float("nan"))
    ('0.13', '0.00', '3', 'bridge', '–')
    """
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{round(value, digits) + 0.0:.{digits}f}"
    return str(value)


def grid(title: str, columns: Mapping[str, bool]) -> Table:
    """An empty table, its title printed. ``columns`` says which are numbers."""
    line(title)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name, right in columns.items():
        table.add_column(escape(name), justify="right" if right else "left", no_wrap=True)
    return table


def rows(table: Any, title: str, digits: int = 2) -> None:
    """A data frame as it is. A column ``x_se`` goes into that of x, as ± so much, unless it is all NaN."""
    from pandas.api.types import is_numeric_dtype

    names = [name for name in table.columns if not name.endswith("_se")]
    numeric = {name: is_numeric_dtype(table[name]) for name in names}
    lines = []
    for row in table.to_dict("records"):
        errors = {name: row.get(f"{name}_se", math.nan) for name in names}
        ends = {name: "" if math.isnan(error) else f" ± {error:.{digits}f}" for name, error in errors.items()}
        lines.append([number(row[name], digits) + ends[name] for name in names])
    if len(lines) > _MANY:
        plain(title, numeric, lines)
        return
    shown = grid(title, numeric)
    for cells in lines:
        shown.add_row(*map(escape, cells))
    screen().print(shown)


def plain(title: str, columns: Mapping[str, bool], lines: Sequence[Sequence[str]]) -> None:
    """Rows by the thousand: columns below each other, and no more."""
    widths = [max(map(len, column)) for column in zip(columns, *lines, strict=True)]
    write = sys.stdout.write
    write(f"{title}\n\n")
    for cells in ([*columns], *lines):
        aligned = zip(cells, widths, columns.values(), strict=True)
        write(" " + "  ".join(x.rjust(w) if right else x.ljust(w) for x, w, right in aligned).rstrip() + "\n")
    write("\n")


def by_head(table: Any, column: str, title: str, *, chance: Any = None, digits: int = 2) -> None:
    """One row per layer: each head (or the lowest and the highest, where they are many), their mean, and chance's."""
    import pandas as pd

    heads = table.pivot_table(values=column, index="layer", columns="head", aggfunc="mean")
    shown = heads
    if len(heads.columns) > _HEADS_SHOWN:
        shown = pd.DataFrame({"lowest": heads.min(axis=1), "highest": heads.max(axis=1)})
    last = ["mean"] if chance is None else ["mean", "random"]
    out = grid(title, dict.fromkeys(["layer", *map(str, shown.columns), *last], True))
    for layer, row in heads.iterrows():
        cells = [*shown.loc[layer], row.mean()]
        if chance is not None:
            cells.append(chance.loc[chance["layer"] == layer, column].mean())
        out.add_row(str(layer), *(number(float(x), digits) for x in cells))
    screen().print(out)
