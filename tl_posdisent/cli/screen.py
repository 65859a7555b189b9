"""Results on the screen: lines and tables, as wide as the terminal, or uncut where stdout is a file or a pipe."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

Shown: TypeAlias = list[str | Table]
"""What a command shows: lines, and tables of rich."""

_HEADS_SHOWN = 12
_UNCUT = 10_000  # columns
_MANY = 1000  # rows, above which rich would take seconds to lay out a table


def show(results: Shown) -> None:
    """Print results to stdout."""
    for result in results:
        if isinstance(result, str):
            sys.stdout.write(f"{result}\n")
        else:
            Console(width=None if sys.stdout.isatty() else _UNCUT).print(result)


def number(value: Any, digits: int = 2) -> str:
    """
    >>> number(0.126), number(-0.001), number(3), number("bridge"), number(float("nan"))
    ('0.13', '0.00', '3', 'bridge', '–')
    """
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{round(value, digits) + 0.0:.{digits}f}"
    return str(value)


def grid(title: str, columns: Mapping[str, bool], rows: Sequence[Sequence[str]]) -> Shown:
    """A title and rows of cells. ``columns`` says of each column whether it has numbers, which are aligned right."""
    if len(rows) > _MANY:
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        aligned = [
            "  ".join(
                x.rjust(w) if right else x.ljust(w) for x, w, right in zip(row, widths, columns.values(), strict=True)
            )
            for row in ([*columns], *rows)
        ]
        return [title, "", *(f" {line}".rstrip() for line in aligned), ""]
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name, right in columns.items():
        table.add_column(escape(name), justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    return [title, table]


def frame(table: Any, title: str, digits: int = 2) -> Shown:
    """A data frame. A column ``x_se`` is shown in that of x, as ``± x_se``, where it is not NaN."""
    from pandas.api.types import is_numeric_dtype

    names = [name for name in table.columns if not name.endswith("_se")]
    rows = []
    for row in table.to_dict("records"):
        errors = {name: row.get(f"{name}_se", math.nan) for name in names}
        rows.append([number(row[name], digits) + spread(errors[name], digits) for name in names])
    return grid(title, {name: is_numeric_dtype(table[name]) for name in names}, rows)


def spread(error: float, digits: int = 2) -> str:
    """
    >>> spread(0.126), spread(float("nan"))
    (' ± 0.13', '')
    """
    return "" if math.isnan(error) else f" ± {error:.{digits}f}"


def by_head(table: Any, column: str, title: str, *, chance: Any = None, digits: int = 2) -> Shown:
    """One row per layer: each head (or the lowest and the highest of many), their mean, and that of ``chance``."""
    import pandas as pd

    heads = table.pivot_table(values=column, index="layer", columns="head", aggfunc="mean")
    shown = heads
    if len(heads.columns) > _HEADS_SHOWN:
        shown = pd.DataFrame({"lowest": heads.min(axis=1), "highest": heads.max(axis=1)})
    shown = shown.assign(mean=heads.mean(axis=1))
    if chance is not None:
        shown["random"] = [chance.loc[chance["layer"] == layer, column].mean() for layer in heads.index]
    rows = [[str(layer), *(number(float(x), digits) for x in row)] for layer, row in shown.iterrows()]
    return grid(title, dict.fromkeys(["layer", *map(str, shown.columns)], True), rows)
