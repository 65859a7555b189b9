"""The colours of every picture: plotly figures, widgets, the report and the figures of the documentation.

One diverging scale (blue below 0, white at 0, red above), one sequential scale (light to dark), eight colours for lines
and bars, and one of these for each component of the scores. Red-green blind readers (deuteranopia and protanopia) tell
all of them apart; the verdicts of heads are told apart by their lightness as well, in grey and with any colour vision.
``tests/viz/test_palette.py`` computes the distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

BLACK, WHITE = "#000000", "#ffffff"
BLUE, ORANGE, GREEN, RUST = "#0342a7", "#d97d00", "#01a46c", "#9e4a00"
PINK, SKY, PLUM, GREY = "#d15eb4", "#1a8efa", "#684761", "#858585"
MAUVE, UMBER, PALE_GREY, NEAR_WHITE = "#985088", "#2b1a00", "#bababa", "#ebebeb"
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RUST, PLUM, GREY)
"""At least 3:1 against white. Grey is for what is not in focus."""
HUES = COLOURS[:-1]
"""All but grey."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")

COMPONENTS = {
    "distance": BLUE,
    "query": GREEN,
    "key": ORANGE,
    "query:key": PLUM,
    "distance:query": SKY,
    "distance:key": RUST,
    "distance:query:key": PINK,
    "semantic": ORANGE,
    "interaction": PINK,
    "residual": GREY,
}
"""The colour of each component of the scores, by its name in tables; ``semantic`` and ``interaction`` are sums."""

VERDICTS = {
    "not used": "#f2f2f2",
    "no effect": "#dcdcdc",
    "first token": RUST,
    "distance": BLUE,
    "static": ORANGE,
    "additive": SKY,
    "more than additive": PINK,
    "more than static": PLUM,
}
"""The colour of each verdict of ``head_verdicts``; undecided ones, and those of other incomplete ladders, are grey."""

NEEDS = {
    "where": BLUE,
    "what": ORANGE,
    "mixed": MAUVE,
    "neither": UMBER,
    "undecided": PALE_GREY,
    "not used": NEAR_WHITE,
}
"""The colour of each verdict of ``where_or_what``, each of a lightness of its own: from dark to light neither, where,
mixed, what, undecided, not used. Figures mark undecided and unused heads by a shape as well."""


def component_colour(name: str) -> str:
    """Return the colour of a component; ``share_key`` and ``distance × key`` name one as well."""
    return COMPONENTS[name.removeprefix("share_").replace(" × ", ":")]


def line_style(number: int) -> dict[str, Any]:
    """Return colour and dash of the nth of several lines; the first forty are distinct."""
    return {"color": HUES[number % len(HUES)], "dash": DASHES[number // len(HUES) % len(DASHES)]}


def faint(colour: str) -> str:
    """Return a fainter colour, for an area behind the line."""
    red, green, blue = rgb(colour)
    return f"rgba({red}, {green}, {blue}, 0.2)"


def rgb(colour: str) -> tuple[int, ...]:
    """Red, green and blue of ``#rrggbb``, from 0 to 255."""
    return tuple(bytes.fromhex(colour[1:]))


Scale = list[list[Any]]


def _scale(colours: str) -> Scale:
    stops = colours.split()
    return [[n / (len(stops) - 1), f"#{colour}"] for n, colour in enumerate(stops)]


NEGATIVE, ZERO, POSITIVE = "#2166ac", "#ffffff", "#b2182b"
DIVERGING = _scale(  # mixed with white in CIELAB, as circuitsvis does
    "2166ac 376fb1 4877b6 5880bc 668ac1 7393c6 819ccb 8ea5d0 9aafd6 a7b9db b4c2e0 c0cce5 cdd6ea d9e0f0 e6eaf5 f2f5fa "
    "ffffff fdf2f0 fae4e2 f7d7d3 f4cac5 f0bcb7 ecafa9 e7a29b e3958d de8780 d87a73 d36c66 cd5f5a c6504e c04142 b92f36 "
    "b2182b"
)
"""From ``NEGATIVE`` (blue) over ``ZERO`` to ``POSITIVE`` (red), as plotly takes it."""
SEQUENTIAL = _scale("ffffd9 edf8b1 c7e9b4 7fcdbb 41b6c4 1d91c0 225ea8 253494 081d58")
"""Pale yellow, green, dark blue (ColorBrewer's YlGnBu)."""


def on_scale(scale: Sequence[Sequence[Any]], share: float) -> str:
    """Return the colour of a number from 0 to 1 on a scale."""
    places = [stop[0] for stop in scale]
    channels = np.array([rgb(stop[1]) for stop in scale])
    return "#" + "".join(f"{round(float(np.interp(share, places, channel))):02x}" for channel in channels.T)


def diverging(low: float, high: float) -> Scale:
    """Return the part of ``DIVERGING`` from one number to a larger one, so that 0 is white whatever the two are."""
    most = max(abs(low), abs(high))
    first, last = ((end / most + 1) / 2 for end in (low, high))
    if (first, last) == (0, 1):
        return DIVERGING
    inner = [[(x - first) / (last - first), colour] for x, colour in DIVERGING if first < x < last]
    return [[0.0, on_scale(DIVERGING, first)], *inner, [1.0, on_scale(DIVERGING, last)]]
