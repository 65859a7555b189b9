"""The colours are told apart with every kind of colour vision, and are used everywhere."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import tl_posdisent as tp
from tl_posdisent.rope import COMPONENTS
from tl_posdisent.viz import palette

# Machado, Oliveira and Fernandes (2009), severity 1, on linear sRGB: rows are red, green, blue.
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
TRITANOPIA = np.array(
    [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
)
XYZ = np.array(  # of linear sRGB, adapted to D50 (Bradford)
    [
        [0.4360747, 0.3850649, 0.1430804],
        [0.2225045, 0.7168786, 0.0606169],
        [0.0139322, 0.0971045, 0.7141733],
    ]
)


def linear(colour: str) -> Any:
    parts = np.array(palette.rgb(colour)) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def to_lab(light: Any) -> Any:
    """CIELAB of linear sRGB."""
    xyz = XYZ @ light / XYZ.sum(1)
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def seen(colour: str, vision: str) -> Any:
    """CIELAB of a colour as an eye of this kind sees it."""
    return to_lab(((VISION | {"tritanopia": TRITANOPIA})[vision] @ linear(colour)).clip(0, 1))


def apart(one: str, other: str, vision: str) -> float:
    return float(np.linalg.norm(seen(one, vision) - seen(other, vision)))


def test_lab_is_the_published_one() -> None:
    assert np.allclose(seen("#ffffff", "normal"), [100, 0, 0], atol=1e-4)
    assert np.allclose(seen("#ff0000", "normal"), [54.29, 80.80, 69.89], atol=0.05)  # of D50


def test_the_diverging_scale_is_mixed_in_cielab() -> None:
    """As circuitsvis mixes its colours, so that images and charts look the same."""
    white = seen(palette.ZERO, "normal")
    for share in np.linspace(-1, 1, 255):
        end = seen(palette.POSITIVE if share > 0 else palette.NEGATIVE, "normal")
        assert (
            np.linalg.norm(
                seen(palette.on_scale(palette.DIVERGING, (share + 1) / 2), "normal")
                - white
                - abs(share) * (end - white)
            )
            < 1
        )


@pytest.mark.parametrize("vision", VISION)
def test_lines_and_bars_are_told_apart(vision: str) -> None:
    pairs = {(a, b): apart(a, b, vision) for a, b in itertools.combinations(palette.HUES, 2)}
    assert min(pairs.values()) > 24, min(pairs, key=lambda pair: pairs[pair])


@pytest.mark.parametrize("vision", [*VISION, "tritanopia"])
def test_verdicts_are_told_apart(vision: str) -> None:
    """Unused heads, which have a mark of their own, are only lighter than undecided ones."""
    pairs = itertools.combinations([colour for name, colour in palette.NEEDS.items() if name != "not used"], 2)
    assert min(apart(a, b, vision) for a, b in pairs) > 30


def test_verdicts_are_told_apart_in_grey() -> None:
    """By their lightness in CIELAB, and in the grey of CSS and of many printers, which is mixed of sRGB as it is."""
    light = [seen(colour, "normal")[0] for colour in palette.NEEDS.values()]
    mixed = [np.dot([0.2126, 0.7152, 0.0722], palette.rgb(colour)).round() for colour in palette.NEEDS.values()]
    printed = [seen(f"#{3 * f'{int(grey):02x}'}", "normal")[0] for grey in mixed]
    for greys in (light, printed):
        assert min(np.diff(sorted(greys))) > 12


@pytest.mark.parametrize("vision", VISION)
def test_scales_have_an_order_that_everybody_sees(vision: str) -> None:
    light = [seen(colour, vision)[0] for _, colour in palette.SEQUENTIAL]
    assert min(-np.diff(light)) > 3  # from light to dark
    both = [seen(colour, vision)[0] for _, colour in palette.DIVERGING]
    assert both[16] == pytest.approx(100, abs=0.5)
    assert (np.diff(both[:17]) > 0).all()
    assert (np.diff(both[16:]) < 0).all()
    pairs = zip(palette.DIVERGING[:9], palette.DIVERGING[:23:-1], strict=True)
    assert min(apart(low[1], high[1], vision) for low, high in pairs) > 30  # half the scale below 0 from above


def test_every_picture_has_these_colours() -> None:
    """Figures, of which the report is made, widgets and their images."""
    rows = pd.DataFrame({"layer": 0, "head": [0, 1], **{e: [1 / 7, 1 / 7] for e in COMPONENTS}, "effect": [-1.0, 2.0]})
    bars = {bar.name: bar.marker.color for bar in tp.plot_shares(rows).data}
    assert bars == {e.replace(":", " × "): palette.component_colour(e) for e in COMPONENTS}
    (heat,) = tp.plot_heads(rows, "effect").data
    assert [list(stop) for stop in heat.colorscale] == palette.DIVERGING
    (heat,) = tp.plot_heads(rows.assign(effect=1.0), "effect").data
    assert [list(stop) for stop in heat.colorscale] == palette.SEQUENTIAL
    fit = tp.fit_additive(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
    widget = str(tp.show_scores(fit, list("abcd"), heads=[0]))
    assert f'"negativeColor": "{palette.NEGATIVE}", "positiveColor": "{palette.POSITIVE}"' in widget
