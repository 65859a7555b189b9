"""Text has enough contrast (WCAG 2, level AA) in the light and in the dark, where pages invert figures."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from support.contrast import ENOUGH, contrast, turned

from tl_posdisent.page.markup import legible
from tl_posdisent.viz import plot_heads, plot_verdicts
from tl_posdisent.viz.palette import BLACK, DIVERGING, GREY, VERDICTS, WHITE, inks, inverted, on_scale, rgb
from tl_posdisent.viz.widgets.offline import DARK_TOKEN, library
from tl_posdisent.viz.widgets.offline import legible as legible_library


def seen(ink: str, behind: str) -> tuple[float, float]:
    """Contrast as drawn, and as a page shows it in the dark."""
    return contrast(rgb(ink), rgb(behind)), contrast(turned(rgb(ink)), turned(rgb(behind)))


def test_there_is_a_colour_of_text_on_every_colour() -> None:
    for parts in itertools.product(range(0, 256, 15), repeat=3):
        behind = "#" + bytes(parts).hex()
        assert np.abs(np.subtract(rgb(inverted(behind)), turned(parts))).max() <= 0.5 + 1e-6
        light, dark = inks(behind)
        assert seen(light, behind)[0] >= ENOUGH, behind
        assert seen(dark, behind)[1] >= ENOUGH, behind


def every_verdict() -> go.Figure:
    names = [*VERDICTS, "undecided", "some other"]
    table = pd.DataFrame({"layer": range(len(names)), "head": 0, "verdict": names, "gap": 0.1})
    assert GREY in str(plot_verdicts(table).data[0].colorscale)
    return plot_verdicts(table)


def every_number(*, signed: bool) -> go.Figure:
    table = pd.DataFrame({"layer": range(101), "head": 0, "effect": np.linspace(-signed, 1, 101)})
    return plot_heads(table, "effect", signed=signed)


@pytest.mark.parametrize(
    "drawn",
    [every_verdict(), every_number(signed=True), every_number(signed=False)],
    ids=["verdicts", "diverging", "sequential"],
)
def test_text_on_every_kind_of_cell(drawn: go.Figure) -> None:
    """Each cell is in one of the maps, which has the colours of its text; one colour for both pages is not enough."""
    (heat,) = drawn.data
    maps, cells = legible(heat), np.array(heat.z, dtype=float)
    assert sum(np.isfinite(one.z).astype(int) for one in maps).tolist() == np.ones_like(cells).tolist()
    assert [one.showscale for one in maps] == [True] + [False] * (len(maps) - 1)
    alike = []
    for one in maps:
        light, dark = one.meta
        assert one.textfont.color == light
        if heat.text is not None:
            assert ((np.array(one.text) != "") == np.isfinite(one.z)).all()
        for z in one.z[np.isfinite(one.z)]:
            share = (z - one.zmin) / (one.zmax - one.zmin)
            behind = on_scale(one.colorscale, float(share))
            assert seen(light, behind)[0] >= ENOUGH, behind
            assert seen(dark, behind)[1] >= ENOUGH, behind
            alike.append(seen(light, behind)[1] >= ENOUGH)
    assert not all(alike)


def test_text_on_coloured_tokens() -> None:
    """Of circuitsvis's own rule, with another limit; it rounds the brightness to two digits."""
    assert library().count(f'brightness()<{DARK_TOKEN}?"white":"black"') == 3
    for share in np.linspace(0, 1, 511):
        behind = on_scale(DIVERGING, float(share))
        brightness = round(float(np.array(rgb(behind)) @ (0.299, 0.587, 0.114)) / 255, 2)
        assert contrast(rgb(WHITE if brightness < DARK_TOKEN else BLACK), rgb(behind)) >= ENOUGH, behind


def test_a_library_with_another_rule_for_text_is_refused() -> None:
    changed = library().replace(f"<{DARK_TOKEN}?", "<.7?")
    with pytest.raises(RuntimeError, match=r"circuitsvis must choose .* but [\d.]+ does not: install circuitsvis"):
        legible_library(changed)
