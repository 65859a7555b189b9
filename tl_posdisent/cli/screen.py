"""Results on the screen: lines and tables of plain text, whatever the width of the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_HEADS_SHOWN = 12


def number(value: Any, digits: int = 2) -> str:
    """
    >>> number(0.126), number(-0.001), number(3), number("bridge"), number(float("nan"))
    ('0.13', '0.00', '3', 'bridge', '–')
    """
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{round(value, digits) + 0.0:.{digits}f}"
    return str(value)


def grid(title: str, columns: Mapping[str, bool], rows: Sequence[Sequence[str]]) -> list[str]:
    """A title and rows of cells. ``columns`` says of each column whether it has numbers, which are aligned right."""
    table = [[*columns], *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = zip(row, widths, columns.values(), strict=True)
        lines.append("  ".join(x.rjust(width) if right else x.ljust(width) for x, width, right in cells))
    return [title, "", *(f" {line}".rstrip() for line in lines), ""]


def frame(table: Any, title: str, digits: int = 2) -> list[str]:
    """A data frame. A column ``x_se`` is shown in that of x, as ``± x_se``, where it is not NaN."""
    from pandas.api.types import is_numeric_dtype

    names = [name for name in table.columns if not name.endswith("_se")]
    rows = []
    for row in table.to_dict("records"):
        errors = {name: row.get(f"{name}_se", math.nan) for name in names}
        rows.append([number(row[name], digits) + spread(errors[name], digits) for name in names])
    return grid(title, {name: is_numeric_dtype(table[name]) for name in names}, rows)


def spread(error: float, digits: int = 2) -> str:
    return "" if math.isnan(error) else f" ± {error:.{digits}f}"


def by_head(table: Any, column: str, title: str, *, chance: Any = None, digits: int = 2) -> list[str]:
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
