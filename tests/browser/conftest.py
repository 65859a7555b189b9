"""A browser that opens files from disk and has no network, and what a page must be free of.

The browser is the system's chromium (`apt-get install chromium`, or `POSDISENT_CHROMIUM=/path`), driven by Playwright;
Playwright's own downloads are not used. Where one of the two is missing the tests skip and say so, unless
`POSDISENT_BROWSER=required` is set: then they fail.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SCREENSHOTS = Path(__file__).parents[2] / "out" / "screenshots"  # git ignores them
SECONDS = 30
_OURS = "willReadFrequently"  # what the browser says of tests that read pixels
# What charts write on their canvases, tooltips too, is nowhere in the document.
_LISTEN = """
window.written = [];
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
  window.written.push(text);
  return fillText.call(this, text, ...at);
};
"""

_SETTLED = """(n) => {
  const all = [...document.querySelectorAll("canvas")].filter((c) => c.offsetWidth);
  const blank = (c) => !c.width || !c.getContext("2d").getImageData(0, 0, c.width, c.height).data.some((x) => x);
  const now = all.length === n && !all.some(blank) && all.map((c) => c.toDataURL()).join();
  const before = window.settling;
  window.settling = now;
  return now !== false && now === before;
}"""


def _missing(what: str) -> None:
    if os.environ.get("POSDISENT_BROWSER") == "required":
        pytest.fail(f"{what}, and POSDISENT_BROWSER=required")
    pytest.skip(what)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless chromium."""
    found = [
        os.environ.get("POSDISENT_CHROMIUM"),
        *map(shutil.which, ("chromium", "chromium-browser", "google-chrome")),
    ]
    path = next(filter(None, found), None)
    if path is None:
        _missing("no chromium is installed")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("playwright is not installed")
    with sync_playwright() as playwright:
        # A sandbox needs rights that containers do not have; software drawing gives the same pixels everywhere.
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@dataclass
class Opened:
    """A page, and what it asked for and complained of."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def settle(self, canvases: int) -> None:
        """Wait until so many charts are visible, each of them drawn, and none of them changes any more."""
        self.page.wait_for_function(_SETTLED, arg=canvases, polling=50)

    def pixel(self, canvas: int, x: float, y: float) -> tuple[int, int, int]:
        """The colour at a place of a visible canvas, in fractions of its size."""
        return tuple(
            self.page.evaluate(
                "([n, x, y]) => { const c = [...document.querySelectorAll('canvas')].filter(c => c.offsetWidth)[n];"
                " return [...c.getContext('2d').getImageData(x * c.width, y * c.height, 1, 1).data].slice(0, 3) }",
                [canvas, x, y],
            )
        )

    def picture(self, canvas: int) -> str:
        """All pixels of a visible canvas."""
        return self.page.evaluate(
            "n => [...document.querySelectorAll('canvas')].filter(c => c.offsetWidth)[n].toDataURL()", canvas
        )

    def find(self, canvas: int, colour: tuple[int, int, int]) -> tuple[float, float]:
        """Where on the page, in CSS pixels, a visible canvas has this very colour (the middle of all such pixels)."""
        place = self.page.evaluate(
            """([n, r, g, b]) => {
              const c = [...document.querySelectorAll("canvas")].filter(c => c.offsetWidth)[n];
              const all = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
              let count = 0, x = 0, y = 0;
              for (let i = 0; i < all.length; i += 4)
                if (all[i] === r && all[i + 1] === g && all[i + 2] === b && all[i + 3] === 255) {
                  count += 1; x += (i / 4) % c.width; y += Math.floor(i / 4 / c.width);
                }
              const box = c.getBoundingClientRect();
              const scale = box.width / c.width / count;
              return count ? [box.x + x * scale, box.y + y * scale] : null;
            }""",
            [canvas, *colour],
        )
        assert place is not None, f"canvas {canvas} has nowhere the colour {colour}"
        return tuple(place)

    def tooltip(self, canvas: int, colour: tuple[int, int, int]) -> list[str]:
        """What a chart writes when one points at its cell of this colour."""
        self.page.locator("canvas >> visible=true").nth(canvas).scroll_into_view_if_needed()
        x, y = self.find(canvas, colour)
        self.page.mouse.move(x - 3, y - 3)
        self.page.evaluate("() => { window.written = [] }")
        self.page.mouse.move(x, y)
        self.page.wait_for_function("() => window.written.some(text => text.startsWith('Val: '))")
        return self.page.evaluate("() => window.written")

    def colour_on_screen(self, selector: str) -> list[float]:
        """The mean red, green and blue that is seen of an element, from 0 to 1."""
        element = self.page.locator(selector).first
        element.scroll_into_view_if_needed()
        return self._decoded(
            element,
            """
            const sums = [0, 0, 0];
            for (let i = 0; i < all.length; i += 4) for (let n = 0; n < 3; n++) sums[n] += all[i + n];
            return sums.map((sum) => sum / (all.length / 4) / 255);
            """,
        )

    def shares_at_edges(self, element: Any, ground: str) -> list[float]:
        """The shares of an element's leftmost and rightmost pixels that have this colour, such as ``rgb(0, 0, 0)``."""
        return self._decoded(
            element,
            f"""
            const seen = (x, y) => `rgb(${{[...all.slice(4 * (y * width + x), 4 * (y * width + x) + 3)].join(", ")}})`;
            const rows = [...Array(height).keys()];
            return [0, width - 1].map((x) => rows.filter((y) => seen(x, y) === "{ground}").length / height);
            """,
        )

    def _decoded(self, element: Any, read: str) -> Any:
        """What JavaScript reads from the pixels (``all``) of an element's screenshot."""
        picture = base64.b64encode(element.screenshot()).decode("ascii")
        blank = self.page.context.new_page()
        found = blank.evaluate(
            f"""async (picture) => {{
              const image = new Image();
              image.src = `data:image/png;base64,${{picture}}`;
              await image.decode();
              const {{ width, height }} = image;
              const canvas = Object.assign(document.createElement("canvas"), {{ width, height }});
              const context = canvas.getContext("2d");
              context.drawImage(image, 0, 0);
              const all = context.getImageData(0, 0, width, height).data;
              {read}
            }}""",
            picture,
        )
        blank.close()
        return found

    def screenshot(self, name: str) -> None:
        """For people to look at."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        charts = self.page.locator("canvas >> visible=true").count()
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
        self.settle(charts)  # it changes the size of the window for a moment, and charts are drawn anew


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Opened]]:
    """`opened(path)`: a file from disk in a fresh profile without a network.

    When the test ends: no error, no warning, and no request but the file itself, unless `may_fail=True`.
    """
    contexts, pages = [], []

    def open_file(
        path: Path,
        *,
        width: int = 1100,
        dark: bool = False,
        may_fail: bool = False,
    ) -> Opened:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, offline=True, color_scheme="dark" if dark else "light"
        )
        contexts.append(context)
        context.set_default_timeout(SECONDS * 1000)
        context.route(lambda url: not url.startswith("file:"), lambda route: route.abort())
        context.add_init_script(_LISTEN)
        seen = Opened(context.new_page())
        seen.page.on("request", lambda request: seen.requests.append(request.url))
        seen.page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        seen.page.on(
            "console",
            lambda said: (
                seen.complaints.append(said.text)
                if said.type in ("error", "warning") and _OURS not in said.text
                else None
            ),
        )
        seen.page.goto(path.as_uri())
        if not may_fail:
            pages.append((seen, path))
        return seen

    yield open_file
    for seen, path in pages:
        assert seen.complaints == []
        assert seen.requests == [path.as_uri()]
    for context in contexts:
        context.close()
