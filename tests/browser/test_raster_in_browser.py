"""Images of scores in a browser: there, with the number under the pointer, and silent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tl_posdisent as tp
from tl_posdisent.viz.palette import NEGATIVE, POSITIVE

pytestmark = pytest.mark.slow

Open = Callable[..., Any]
PIXEL = """([x, y]) => {
  const image = document.querySelector("img"), canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  return [...context.getImageData(x, y, 1, 1).data];
}"""


def drawn(page: Any) -> None:
    page.wait_for_function("() => [...document.images].length && [...document.images].every(x => x.naturalWidth)")


def readout(page: Any, x: float, y: float, *, nth: int = 0) -> str:
    """What stands below the image when one points there, in fractions of its size."""
    box = page.locator("img").nth(nth).bounding_box()
    width, height = box["width"] - 2, box["height"] - 2  # inside the border
    page.mouse.move(box["x"] + 1 + x * width, box["y"] + 1 + y * height)
    line = page.locator("[data-readout]").nth(nth)
    page.wait_for_function("line => line.textContent.trim()", arg=line.element_handle())
    return str(line.text_content())


def test_image(opened: Open, tmp_path: Path) -> None:
    n = 300
    distance = torch.arange(n)[:, None] - torch.arange(n)
    scores = torch.stack([1.0 - distance / (n - 1) * 2, 1.0 * (torch.arange(n) == 40).expand(n, n)])
    fit = tp.fit_additive(scores)
    words = ["<s>", *(f" w{i}" for i in range(1, n - 1)), "</script><script>window.pwned = true</script>"]
    widget = tp.show_scores(fit, words, "scores", scores=scores, centred=False, scale=1.0, raster=True)
    one = opened(widget.save(tmp_path / "raster.html"))
    page = one.page
    drawn(page)
    assert page.evaluate(PIXEL, [0, n - 1])[:3] == [*bytes.fromhex(NEGATIVE[1:])]  # -1
    assert page.evaluate(PIXEL, [7, 7])[:3] == [*bytes.fromhex(POSITIVE[1:])]
    assert page.evaluate(PIXEL, [n - 1, 0])[:3] == [200, 200, 200]
    assert readout(page, 0.5 / n + 0.001, 0.998).startswith(f"query {n - 1} </script><script>window")
    middle = float(readout(page, 0.25, 0.75).split(": ")[1])  # half the text away: the middle of the scale
    assert abs(middle) <= 1 / 127 + 1e-6
    assert readout(page, 0.9, 0.1).endswith("after the query")
    one.screenshot("raster")
    page.select_option("select", index=1)
    drawn(page)
    assert "of head 1, 300 queries" in page.locator("img").get_attribute("alt")
    assert page.evaluate(PIXEL, [40, n - 1])[:3] == [*bytes.fromhex(POSITIVE[1:])]
    assert readout(page, 40.5 / n, 0.8).endswith("key 40 ·w40: 1")
    assert page.evaluate("window.pwned") is None
