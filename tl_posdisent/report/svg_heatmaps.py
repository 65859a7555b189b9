"""Heat maps of the report, as SVG, with the colours of the page's style."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from tl_posdisent.viz.palette import DIVERGING, SEQUENTIAL, ink, on_scale

from .markup import MISSING, escape, head_id, number, short

_APART = 1024  # cells that have a tooltip each; more are one area for each of 64 colours, to keep the file small
_WRITTEN = 20  # columns beside each other that have room for their numbers
_TOP, _BELOW = 4, 34
_CHARACTER = 6.2  # width of one at 11 px


def picture(width: float | int, height: float | int, label: str, content: str, *, fixed: bool = False) -> str:
    """An SVG that grows with its column; ``fixed``: it never shrinks below its size, its box scrolls instead."""
    shape = f"max-width:{1.5 * width:.0f}px" + (f";min-width:{width:.0f}px" if fixed else "")
    svg = (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label)}" style="{shape}">'
        f"{content}</svg>"
    )
    return f'<div class="scroll" role="group" aria-label="{escape(label)}" tabindex="0">{svg}</div>' if fixed else svg


def figure(content: str, caption: str) -> str:
    """A picture with its caption, of HTML."""
    return f"<figure>{content}<figcaption>{caption}</figcaption></figure>"


def text(x: float | int, y: float | int, content: str, anchor: str = "middle", more: str = "") -> str:
    """A label; 11 px unless the style says otherwise."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(content)}</text>'


def thinned(names: Sequence[str], room: float | int) -> list[int]:
    """Which labels to write where each has so much room: all, or every second, fifth, tenth …"""
    widest = max((len(name) for name in names), default=1) * _CHARACTER + 4
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, len(names) + 1) if s * room >= widest or s > len(names))
    return list(range(0, len(names), step))


def heat_map(
    grid: pd.DataFrame,
    *,
    label: str,
    rows: str,
    columns: str,
    low: float | int,
    high: float | int,
    names: Sequence[str] | None = None,
    diverging: bool = False,
    linked: bool = False,
) -> str:
    """A number for each row and column: its colour, the number itself where there is room, and a tooltip.

    Of more than 1024 cells only the colours are drawn.

    Args:
        grid: index and columns are whole numbers, such as layers and heads; NaN is left blank.
        label: what it shows, for those who cannot see it.
        rows, columns: what index and columns are.
        low, high: ends of the colour scale.
        names: of the rows, where they are not numbers.
        diverging: colours that part at the middle of the scale.
        linked: rows are layers and columns heads, and each cell is a link to the row of its head.
    """
    values = grid.to_numpy(dtype=float)
    scale = DIVERGING if diverging else SEQUENTIAL
    share = np.clip((values - low) / (high - low), 0, 1) if high > low else np.full_like(values, 0.5)
    largest = float(np.nanmax(np.abs(values), initial=0.0))

    def cell(i: int, j: int) -> _Cell | None:
        value = float(values[i, j])
        if math.isnan(value):
            return None
        at = float(share[i, j]) if values.size <= _APART else round(63 * float(share[i, j])) / 63
        tip = number(value) if 1e-2 <= largest < 1e4 else f"{value:.3g}".replace("-", "−")
        return on_scale(scale, at), short(value, largest), tip

    return _grid_map(grid, cell, label=label, rows=rows, columns=columns, names=names, linked=linked)


def category_map(
    grid: pd.DataFrame, colour_of: Callable[[str], str], *, label: str, rows: str, columns: str, linked: bool = False
) -> str:
    """A word for each row and column, as its colour and first letter; what is no word is left blank.

    Arguments are those of ``heat_map``; ``colour_of`` gives the colour of a word.
    """
    words = grid.to_numpy(dtype=object)

    def cell(i: int, j: int) -> _Cell | None:
        word = words[i, j]
        if not isinstance(word, str):
            return None
        return colour_of(word), MISSING if word.startswith("no ") else word[0].upper(), word

    return _grid_map(grid, cell, label=label, rows=rows, columns=columns, names=None, linked=linked)


_Cell = tuple[str, str, str]
"""Colour, what is written where there is room, tooltip."""


def _grid_map(
    grid: pd.DataFrame,
    cell_of: Callable[[int, int], _Cell | None],
    *,
    label: str,
    rows: str,
    columns: str,
    names: Sequence[str] | None,
    linked: bool,
) -> str:
    n_rows, n_columns = grid.shape
    across = 38 if n_columns <= _WRITTEN else 13 if n_columns <= 36 else 9
    down = 24 if n_columns <= _WRITTEN and n_rows <= 32 else 16
    row_names = [str(x) for x in grid.index] if names is None else list(names)
    left = 26 + _CHARACTER * max(map(len, row_names))  # the rows' names, and what they are
    written = n_columns <= _WRITTEN and down == 24
    by_colour: dict[str, str] = {}
    cells = []
    for i, j in np.ndindex(*grid.shape):
        x, y = left + j * across, _TOP + i * down
        found = cell_of(i, j)
        if found is None:
            continue
        colour, shown, tip = found
        if grid.size > _APART:
            by_colour[colour] = by_colour.get(colour, "") + f"M{x:.0f} {y}h{across}v{down}h-{across}z"
            continue
        at = f"{rows} {row_names[i]}, {columns} {grid.columns[j]}: {tip}"
        cell = f'<rect x="{x:.1f}" y="{y}" width="{across}" height="{down}" fill="{colour}"/>'
        if written:
            cell += text(x + across / 2, y + down / 2 + 4, shown, more=f' style="fill:{ink(colour)}"')
        cell = f"<g><title>{escape(at)}</title>{cell}</g>"
        layer, head = grid.index[i], grid.columns[j]
        cells.append(f'<a href="#{head_id(layer, head)}">{cell}</a>' if linked else cell)
    cells += [f'<path fill="{colour}" d="{path}"/>' for colour, path in by_colour.items()]
    bottom = _TOP + n_rows * down
    ticks = [
        text(left - 5, _TOP + (i + 0.5) * down + 4, row_names[i], "end")
        for i in range(0, n_rows, 1 if down > 12 else 2)
    ]
    column_names = [str(x) for x in grid.columns]
    ticks += [text(left + (j + 0.5) * across, bottom + 14, column_names[j]) for j in thinned(column_names, across)]
    ticks.append(text(left + n_columns * across / 2, bottom + 29, columns))
    middle = _TOP + n_rows * down / 2
    ticks.append(text(11, middle, rows, more=f' transform="rotate(-90 11 {middle:.1f})"'))
    wide = max(left + n_columns * across + 4, left + len(columns) * _CHARACTER)
    return picture(wide, bottom + _BELOW, label, "".join(cells + ticks), fixed=True)


def colour_bar(low: str, high: str, *, diverging: bool = False) -> str:
    """What the colours of a heat map mean, for its caption."""
    stops = ",".join(on_scale(DIVERGING if diverging else SEQUENTIAL, n / 4) for n in range(5))
    bar = f'<span class="bar" style="background:linear-gradient(to right,{stops})"></span>'
    return f'<span class="scale">{escape(low)}{bar}{escape(high)}</span>'
