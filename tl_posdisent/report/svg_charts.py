"""Line charts and stacked bars of the report, as SVG.

Not plotly's: its library adds 4.8 MB of script to a page that is to stay small, and its figures do not follow the page
in dark mode and print.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tl_posdisent.viz.palette import COMPONENTS, HUES, VERDICTS, colour_number, component_colour

from .markup import escape, number
from .svg_heatmaps import picture, text, thinned

_WIDTH, _HEIGHT = 340, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 10, 40
_CHARACTER = 6.2  # width of one at 11 px
_ROUNDING = 0.02  # less than this share below 0 is no reason for a negative axis
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "12 4")

Line = tuple[Sequence[float | int], Sequence[float | int]]


def line_chart(
    lines: Mapping[str, Line],
    *,
    label: str,
    x_name: str,
    y_name: str,
    ticks: Sequence[float | int],
    logarithmic: bool = False,
    dots: bool = False,
    errors: Mapping[str, Sequence[float | int]] | None = None,
) -> str:
    """Lines with their names, which the legend of the page shows (``legend``); NaN is left out.

    Args:
        lines: name to x and y.
        label: what it shows, for those who cannot see it.
        ticks: written along x.
        logarithmic: x as log(1 + x).
        dots: mark the points.
        errors: name to standard errors, drawn as upright lines; NaN for none.
    """
    errors = errors or {}

    def place(x: float | int) -> float:
        return math.log1p(x) if logarithmic else float(x)

    every = [y for _, ys in lines.values() for y in ys if math.isfinite(y)] or [0.0]
    for name, bars in errors.items():
        known = [(y, e) for y, e in zip(lines[name][1], bars, strict=True) if math.isfinite(y) and math.isfinite(e)]
        every += [y + sign * e for y, e in known for sign in (1, -1)]
    low, high = min(*every, 0.0), max(*every, 0.0)
    y_ticks = nice_ticks(low if low < -_ROUNDING * high else 0.0, high)
    y_names = [_tick(y, y_ticks) for y in y_ticks]
    left = max(_LEFT, 24 + _CHARACTER * max(map(len, y_names)))
    xs = [x for line_xs, _ in lines.values() for x in line_xs] or [0.0]
    x0, x1 = place(min(xs)), place(max(xs))
    wide, tall = _WIDTH - left - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at_x(x: float | int) -> float:
        return left + wide * (place(x) - x0) / ((x1 - x0) or 1.0)

    def at_y(y: float | int) -> float:
        return _TOP + tall * (y_ticks[-1] - y) / ((y_ticks[-1] - y_ticks[0]) or 1.0)

    parts = []
    for y, y_text in zip(y_ticks, y_names, strict=True):
        kind = "axis" if y == 0 else "grid"
        parts.append(f'<path class="{kind}" d="M{left:.0f} {at_y(y):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(text(left - 5, at_y(y) + 4, y_text, "end"))
    names, last = [_plain(x) for x in ticks], -math.inf
    for x, name in zip(ticks, names, strict=True):
        half = len(name) * 3.4
        if at_x(x) - half > last:
            parts.append(text(at_x(x), _HEIGHT - _BOTTOM + 16, name))
            last = at_x(x) + half + 4
    for n, (name, (line_xs, ys)) in enumerate(lines.items()):
        points = [(at_x(x), at_y(y)) for x, y in zip(line_xs, ys, strict=True) if math.isfinite(y)]
        drawn = f'<path class="line" style="{style_of(n)}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'
        drawn = drawn if points else ""
        for x, y, error in zip(line_xs, ys, errors.get(name, ()), strict=False):
            if math.isfinite(y) and math.isfinite(error):
                bar = f"M{at_x(x):.1f} {at_y(y - error):.1f}V{at_y(y + error):.1f}"
                drawn += f'<path class="error" style="stroke:var(--c{n % len(HUES)})" d="{bar}"/>'
        if dots:
            drawn += "".join(
                f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="3" style="fill:var(--c{n % len(HUES)})">'
                f"<title>{escape(name)}, {_plain(x)}: {number(y, 4)}</title></circle>"
                for x, y in zip(line_xs, ys, strict=True)
                if math.isfinite(y)
            )
        parts.append(f"<g><title>{escape(name)}</title>{drawn}</g>")
    parts.append(text(left + wide / 2, _HEIGHT - 6, x_name))
    middle = _TOP + tall / 2
    parts.append(text(10, middle, y_name, more=f' transform="rotate(-90 10 {middle:.1f})"'))
    return picture(_WIDTH, _HEIGHT, label, "".join(parts))


def stacked_bars(
    bars: Sequence[str], parts: Mapping[str, Sequence[float | int]], groups: Sequence[str], *, label: str, x_name: str
) -> str:
    """Shares one on top of the other; neighbouring bars of one group have its name below them.

    Args:
        bars: their names, written where there is room.
        parts: name of a part to its share in each bar.
        groups: one for each bar; empty names are not written.
        label: what it shows, for those who cannot see it.
        x_name: what the bars are.
    """
    across = max(4.0, min(40.0, 300 / len(bars))) if len(bars) <= 20 else 14.0 if len(bars) <= 96 else 5.0
    wide, tall, top = across * len(bars), 170.0, 8.0
    values = np.array(list(parts.values()), dtype=float)
    # A share can be a little below 0 (what one subspace takes back of another): it hangs down.
    lowest = min(0.0, float(np.nansum(np.minimum(values, 0), axis=0).min()))
    highest = float(np.nansum(np.maximum(values, 0), axis=0).max()) or 1.0
    lowest = lowest if lowest < -_ROUNDING * highest else 0.0
    ticks = nice_ticks(lowest, min(highest, 1.0))  # shares that add up to 1 do so up to rounding
    lowest, highest = ticks[0], max(ticks[-1], highest)

    def at_y(y: float | int) -> float:
        return top + tall * (highest - y) / (highest - lowest)

    drawn = []
    for y in ticks:
        drawn.append(f'<path class="grid" d="M{_LEFT} {at_y(y):.1f}h{wide:.1f}"/>')
        drawn.append(text(_LEFT - 5, at_y(y) + 4, _tick(y, ticks), "end"))
    up, down = np.zeros(len(bars)), np.zeros(len(bars))
    for n, (name, row) in enumerate(zip(parts, values, strict=True)):
        for i, share in enumerate(np.nan_to_num(row)):
            base = up if share >= 0 else down
            y0, y1 = at_y(base[i] + max(share, 0)), at_y(base[i] + min(share, 0))
            base[i] += share
            if y1 - y0 < 0.05:
                continue
            what = f"{groups[i]} {bars[i]}".strip()
            drawn.append(
                f'<rect class="part" x="{_LEFT + i * across:.1f}" y="{y0:.1f}" width="{across:.1f}" '
                f'height="{y1 - y0:.1f}" style="{fill_of(name, n)}">'
                f"<title>{escape(what)}, {escape(name)}: {number(float(row[i]))}</title></rect>"
            )
    bottom = at_y(lowest)
    drawn += [text(_LEFT + (i + 0.5) * across, bottom + 14, bars[i]) for i in _spread(bars, groups, across)]
    spans = _spans(groups)
    shown = thinned([groups[start] for start, _ in spans], wide / len(spans))
    for start, end in (spans[n] for n in shown):
        drawn.append(text(_LEFT + (start + end) / 2 * across, bottom + 29, groups[start]))
    drawn.append(text(_LEFT + wide / 2, bottom + (44 if any(groups) else 29), x_name))
    return picture(_LEFT + wide + 8, bottom + (50 if any(groups) else 36), label, "".join(drawn), fixed=len(bars) > 20)


def _spread(bars: Sequence[str], groups: Sequence[str], across: float | int) -> list[int]:
    """Bars whose names are written: as many of each group, beginning with its first."""
    spans, at = _spans(groups), thinned(list(bars), across)
    every = at[1] - at[0] if len(at) > 1 else max(end - start for start, end in spans)
    kept: list[int] = []
    for start, end in spans:
        kept += [i for i in range(start, end, every) if not kept or i - kept[-1] >= every]
    return kept


def _spans(groups: Sequence[str]) -> list[tuple[int, int]]:
    """First and last + 1 of each run of equal names."""
    starts = [i for i in range(len(groups)) if i == 0 or groups[i] != groups[i - 1]]
    return list(zip(starts, [*starts[1:], len(groups)], strict=True))


def legend(names: Sequence[str], *, lines: bool) -> str:
    """The names of lines or parts beside their colours, as a list that wraps."""
    items = ""
    for n, name in enumerate(names):
        mark = (
            f'<path class="line" style="{style_of(n)}" d="M0 6H26"/>'
            if lines
            else f'<rect width="14" height="12" x="6" style="{fill_of(name, n)}"/>'
        )
        items += f'<li><svg viewBox="0 0 26 12" aria-hidden="true">{mark}</svg>{escape(name)}</li>'
    return f'<ul class="legend">{items}</ul>'


def fill_of(name: str, n: int) -> str:
    """The colour of a component of the scores or of a verdict; of other parts the nth of the page's."""
    if name in VERDICTS:
        return f"fill:{VERDICTS[name]}"
    known = name.replace(" × ", ":") in COMPONENTS
    return f"fill:var(--c{colour_number(component_colour(name)) if known else n % len(HUES)})"


def style_of(n: int) -> str:
    """Colour and dash of the nth line: no two of the first thirty-five are alike."""
    dash = _DASHES[(n // len(HUES) + n) % len(_DASHES)]
    return f"stroke:var(--c{n % len(HUES)})" + (f";stroke-dasharray:{dash}" if dash else "")


def nice_ticks(low: float | int, high: float | int) -> list[float]:
    """Four to eight round numbers around an interval."""
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(m * power for m in (1, 2, 5, 10) if span / (m * power) <= 6)
    return [round(n * step, 12) for n in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def _tick(value: float | int, ticks: Sequence[float | int]) -> str:
    largest = max(map(abs, ticks))
    if not 1e-2 <= largest < 1e5:
        return f"{value:.3g}".replace("e-0", "e−").replace("e+0", "e").replace("-", "−")
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    return number(value, max(0, -math.floor(math.log10(step) + 1e-9)))


def _plain(x: float | int) -> str:
    return f"{x:g}".replace("-", "−")
