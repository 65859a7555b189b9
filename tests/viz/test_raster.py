"""Images of score matrices: their pixels are the values, and what is refused as a chart is drawn as an image."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib

import pytest
import torch
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.viz.palette import NEGATIVE, POSITIVE
from tl_posdisent.viz.widgets import raster
from tl_posdisent.viz.widgets.layout import CELLS, IMAGE_CELLS
from tl_posdisent.viz.widgets.offline import Widget

GREY = (200, 200, 200)


def decoded(uri: str) -> tuple[Tensor, list[tuple[int, ...]]]:
    """Palette numbers and palette of a PNG, every check sum verified."""
    content = base64.b64decode(uri.removeprefix("data:image/png;base64,"), validate=True)
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(content):
        (size,) = struct.unpack(">I", content[at : at + 4])
        kind, body = content[at + 4 : at + 8], content[at + 8 : at + 8 + size]
        assert struct.unpack(">I", content[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + body),)
        chunks[kind], at = body, at + 12 + size
    assert list(chunks) == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]
    width, height, *kind = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert kind == [8, 3, 0, 0, 0]  # eight bits, a palette
    rows = torch.tensor(list(zlib.decompress(chunks[b"IDAT"])), dtype=torch.uint8).view(height, width + 1)
    assert not rows[:, 0].any()  # no filters
    return rows[:, 1:], [tuple(chunks[b"PLTE"][i : i + 3]) for i in range(0, len(chunks[b"PLTE"]), 3)]


def data_of(widget: Widget) -> dict:
    (found,) = re.findall(r"const data = (\{.*\});\n", widget.fragment())
    return json.loads(found)


def values(number: Tensor, scale: float) -> Tensor:
    return torch.where(number == 0, torch.nan, (number.double() - 128) / 127 * scale)


def fitted(heads: int, length: int) -> tuple[Tensor, tp.AdditiveFit, list[str]]:
    scores = torch.randn(heads, length, length, generator=torch.Generator().manual_seed(0))
    return scores, tp.fit_additive(scores), [f" w{i}" for i in range(length)]


def test_colours_are_those_of_the_charts() -> None:
    """White is 0, the ends are the two colours, and both ways the colours only get darker."""
    palette = raster.palette()
    low, high = (tuple(bytes.fromhex(colour[1:])) for colour in (NEGATIVE, POSITIVE))
    assert (palette[0], palette[1], palette[128], palette[255]) == (GREY, low, (255, 255, 255), high)
    assert len(palette) == 256
    luminance = torch.tensor(palette, dtype=torch.float64) @ torch.tensor([0.2126, 0.7152, 0.0722], dtype=torch.float64)
    assert bool((luminance[1:129].diff() > 0).all() and (luminance[128:].diff() < 0).all())
    numbers, of_image = decoded(raster.png(torch.arange(256, dtype=torch.uint8).view(8, 32)))
    assert torch.equal(numbers.flatten(), torch.arange(256, dtype=torch.uint8))
    assert of_image == palette


def test_what_is_refused_as_a_chart_is_drawn_as_an_image() -> None:
    """The refusal says how, and what it says is accepted; there is a limit to images as well."""
    _, fit, words = fitted(2, 400)
    assert CELLS < 2 * 400**2
    with pytest.raises(ValueError, match=r" or raster=True$"):
        tp.show_scores(fit, words)
    with pytest.raises(ValueError, match=r" or raster=True$"):
        tp.show_parts(fit, words, 0)
    assert len(data_of(tp.show_scores(fit, words, raster=True))["choices"]) == 2
    assert data_of(tp.show_parts(fit, words, 0, raster=True))["captions"] == ["fitted", "distance", "query", "key"]
    length = 8 + int(IMAGE_CELLS**0.5)
    large = tp.fit_additive_qk(torch.randn(length, 1, 2), torch.randn(length, 1, 2), scale=1.0)
    with pytest.raises(ValueError, match=f"images have {IMAGE_CELLS} at most") as refusal:
        tp.show_scores(large, [""] * length, raster=True)
    assert "raster" not in str(refusal.value)


def test_images_have_the_numbers_of_the_charts() -> None:
    """To half a step of the scale, of every widget, head and component; grey after the query, and nowhere else."""
    scores, fit, words = fitted(3, 20)
    pattern = scores.masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    for make in (
        lambda r: tp.show_patterns(fit, words, pattern, heads=[2, 0], raster=r),
        lambda r: tp.viz.show_change(pattern, pattern.flip(0), words, positions=[2, 5, 9], raster=r),
        lambda r: tp.show_parts(fit, words, 1, scores=scores, raster=r),
    ):
        chart, images = data_of(make(False)), data_of(make(True))
        assert images["captions"] == chart["captions"]
        assert images["tokens"] == chart["common"]["tokens"]
        assert images["scale"] == chart["common"]["maxValue"]
        for of_chart, of_image in zip(chart["choices"], images["choices"], strict=True):
            for one, image in zip(of_chart, of_image, strict=True):
                seen = values(decoded(image["src"])[0], images["scale"])
                known = torch.tensor(one["attention"], dtype=torch.float64).clamp(-images["scale"], images["scale"])
                inside = torch.ones_like(known, dtype=torch.bool).tril()
                assert torch.equal(seen.isnan(), ~inside)
                error = (seen - known)[inside].abs().max()
                assert error <= (0.5 / 127 + 0.001) * images["scale"]  # half a step, and the chart's rounding
    assert data_of(tp.show_patterns(fit, words, pattern, positions=[2, 5], raster=True))["positions"] == [2, 5]
    full = tp.fit_additive(scores, mask="full")
    (image,) = data_of(tp.show_scores(full, words, heads=[0], raster=True))["choices"][0]
    assert not (decoded(image["src"])[0] == 0).any()
    assert "of head 0, 20 queries (rows)" in image["alt"]
