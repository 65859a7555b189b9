"""The colours of every picture: plotly figures, widgets, the report and the figures of the documentation.

One diverging scale (blue below 0, white at 0, red above), one sequential scale (light to dark), eight colours for lines
and bars, and one of these for each component of the scores. Red-green blind readers (deuteranopia and protanopia) tell
all of them apart; ``tests/viz/test_palette.py`` computes the distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# --- light and contrast -----------------------------------------------------------------------------------------


def linear(colour: str) -> Any:
    """Red, green and blue light of ``#rrggbb``, each from 0 to 1."""
    parts = np.array(_rgb(colour)) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG defines it."""
    return float(np.dot((0.2126, 0.7152, 0.0722), linear(colour)))


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, from 1 to 21, as WCAG defines it."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


BLACK, WHITE = "#000000", "#ffffff"


def ink(background: str) -> str:
    """Black or white, whichever is read better on this colour."""
    return max(BLACK, WHITE, key=lambda colour: contrast(colour, background))


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


# --- lines and bars ---------------------------------------------------------------------------------------------

BLUE, ORANGE, GREEN, RUST = "#0342a7", "#d97d00", "#01a46c", "#9e4a00"
PINK, SKY, PLUM, GREY = "#d15eb4", "#1a8efa", "#684761", "#858585"
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
    "no effect": "#e4e4e4",
    "positional": BLUE,
    "static": ORANGE,
    "banded": GREEN,
    "query-dependent": PINK,
}
"""The colour of each verdict of ``head_verdicts``; grey for those of an incomplete ladder."""


def verdict_colour(name: str) -> str:
    """The colour of a verdict."""
    return VERDICTS.get(name, GREY)


def component_colour(name: str) -> str:
    """The colour of a component; ``share_key`` and ``distance × key`` name one as well."""
    return COMPONENTS[name.removeprefix("share_").replace(" × ", ":")]


def line_style(number: int) -> dict[str, Any]:
    """Colour and dash of the nth line of many: no two of the first forty are alike."""
    return {"color": HUES[number % len(HUES)], "dash": DASHES[number // len(HUES) % len(DASHES)]}


def faint(colour: str) -> str:
    """The same colour, for an area behind its line."""
    red, green, blue = _rgb(colour)
    return f"rgba({red}, {green}, {blue}, 0.2)"


# --- scales -----------------------------------------------------------------------------------------------------

NEGATIVE, ZERO, POSITIVE = "#2166ac", "#ffffff", "#b2182b"
"""Ends and middle of the diverging scale: low is blue, high is red."""
_SMALL, _SLOPE = 216 / 24389, 24389 / 27
_XYZ = np.array(  # of linear sRGB, adapted to D50 (Bradford)
    [
        [0.4360747, 0.3850649, 0.1430804],
        [0.2225045, 0.7168786, 0.0606169],
        [0.0139322, 0.0971045, 0.7141733],
    ]
)


def diverging(share: float) -> str:
    """The colour of a number from -1 to 1: mixed with white in CIELAB, as circuitsvis does."""
    white, end = to_lab(ZERO), to_lab(POSITIVE if share > 0 else NEGATIVE)
    return _from_lab(white + abs(share) * (end - white))


def to_lab(colour: str) -> Any:
    """CIELAB coordinates (of D50) of a colour; their distance is how different two colours look."""
    xyz = _XYZ @ linear(colour) / _XYZ.sum(1)
    x, y, z = np.where(xyz > _SMALL, np.cbrt(xyz), (_SLOPE * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def _from_lab(lab: Any) -> str:
    y = (lab[0] + 16) / 116
    roots = np.array([y + lab[1] / 500, y, y - lab[2] / 200])
    xyz = np.where(roots**3 > _SMALL, roots**3, (116 * roots - 16) / _SLOPE)
    light = np.linalg.solve(_XYZ, xyz * _XYZ.sum(1)).clip(0, 1)
    shown = np.where(light <= 0.0031308, light * 12.92, 1.055 * light ** (1 / 2.4) - 0.055)
    return "#" + "".join(f"{round(255 * float(x)):02x}" for x in shown)


Scale = list[list[Any]]
DIVERGING: Scale = [[n / 32, diverging(n / 16 - 1)] for n in range(33)]
"""As plotly takes it: blue, white, red."""
_LIGHT_TO_DARK = ("#ffffd9", "#edf8b1", "#c7e9b4", "#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8", "#253494", "#081d58")
SEQUENTIAL: Scale = [[n / 8, colour] for n, colour in enumerate(_LIGHT_TO_DARK)]
"""As plotly takes it: pale yellow, green, dark blue (ColorBrewer's YlGnBu)."""


def on_scale(scale: Sequence[Sequence[Any]], share: float) -> str:
    """The colour of a number from 0 to 1 on a scale."""
    places = [stop[0] for stop in scale]
    channels = np.array([_rgb(stop[1]) for stop in scale])
    return "#" + "".join(f"{round(float(np.interp(share, places, channel))):02x}" for channel in channels.T)
