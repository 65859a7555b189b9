"""The colours are told apart with every kind of colour vision, are read on their pages, and are used everywhere."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.imports import PACKAGE, sources

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
XYZ = np.array(  # of linear sRGB, adapted to D50 (Bradford)
    [
        [0.4360747, 0.3850649, 0.1430804],
        [0.2225045, 0.7168786, 0.0606169],
        [0.0139322, 0.0971045, 0.7141733],
    ]
)
ROOT = Path(__file__).parents[2]


def linear(colour: str) -> Any:
    parts = np.array(palette.rgb(colour)) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """As WCAG defines it."""
    low, high = sorted(float(linear(colour) @ (0.2126, 0.7152, 0.0722)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def to_lab(light: Any) -> Any:
    """CIELAB of linear sRGB."""
    xyz = XYZ @ light / XYZ.sum(1)
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def seen(colour: str, vision: str) -> Any:
    """CIELAB of a colour as an eye of this kind sees it."""
    return to_lab((VISION[vision] @ linear(colour)).clip(0, 1))


def apart(one: str, other: str, vision: str) -> float:
    return float(np.linalg.norm(seen(one, vision) - seen(other, vision)))


def test_lab_and_contrast_are_the_published_ones() -> None:
    assert np.allclose(seen("#ffffff", "normal"), [100, 0, 0], atol=1e-4)
    assert np.allclose(seen("#ff0000", "normal"), [54.29, 80.80, 69.89], atol=0.05)  # of D50
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # WCAG's well-known example


def test_the_diverging_scale_is_mixed_in_cielab() -> None:
    """As circuitsvis mixes its colours, so that images and charts look the same."""
    white = seen(palette.ZERO, "normal")
    for share in np.linspace(-1, 1, 255):
        end = seen(palette.POSITIVE if share > 0 else palette.NEGATIVE, "normal")
        assert np.linalg.norm(seen(palette.diverging(share), "normal") - white - abs(share) * (end - white)) < 1


@pytest.mark.parametrize("vision", VISION)
def test_lines_and_bars_are_told_apart(vision: str) -> None:
    pairs = {(a, b): apart(a, b, vision) for a, b in itertools.combinations(palette.HUES, 2)}
    assert min(pairs.values()) > 24, min(pairs, key=lambda pair: pairs[pair])


def test_colours_have_contrast_to_their_page() -> None:
    assert min(contrast(colour, palette.WHITE) for colour in palette.COLOURS) >= 3


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


def test_numbers_are_read_on_every_colour_of_a_scale() -> None:
    for scale in (palette.DIVERGING, palette.SEQUENTIAL):
        for share in np.linspace(0, 1, 101):
            colour = palette.on_scale(scale, float(share))
            assert contrast(palette.ink(colour), colour) >= 4.5


def test_components_drawn_together_have_colours_of_their_own() -> None:
    for together in (COMPONENTS, ("distance", "query", "key", "residual"), ("distance", "semantic", "interaction")):
        assert len({palette.component_colour(name) for name in together}) == len(together)
    assert len({*palette.VERDICTS.values(), palette.GREY}) == len(palette.VERDICTS) + 1
    assert palette.component_colour("share_distance") == palette.component_colour("distance")
    assert palette.component_colour("distance × key") == palette.component_colour("distance:key")


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
    assert f'"negativeColor":"{palette.NEGATIVE}","positiveColor":"{palette.POSITIVE}"' in widget
    assert f"{palette.NEGATIVE},#fff,{palette.POSITIVE}" in widget


def test_no_other_file_has_colours_of_its_own() -> None:
    """Of pages, texts and borders, which are shades of grey and the report's style, there are few."""
    allowed = {"palette.py", "build.py", "output.py"}  # the latter two: pages, not data
    docs = [ROOT / "docs" / "figures" / name for name in ("make.py", "sum_of_parts.py")]
    for path in (*(p for p in sources().values() if p.name not in allowed), *docs):
        source = path.read_text(encoding="utf-8")
        assert not re.search(r"RdBu|YlGnBu|Viridis", source), path
        colours = re.findall(r"#(?:[0-9a-fA-F]{6}|[0-9a-fA-F]{3})\b", source)
        hues = [c for c in colours if len(set(c[1:] if len(c) == 4 else re.findall("..", c[1:]))) > 1]
        assert not hues, f"{path.relative_to(ROOT)}: {hues}"
    assert (PACKAGE / "viz" / "palette.py").is_file()
