"""The report, opened from disk without a network: drawn, legible on a phone and in the dark, and silent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tl_posdisent as tp
from tl_posdisent.report.measurements import SECTIONS

pytestmark = pytest.mark.slow

Open = Callable[..., Any]

ATTACK = "window.pwned = true"
# Two charts of parts, six matrices each, and of patterns, two each.
CANVASES = 6 + 2 + 6 + 2

# Labels of a figure that lie over each other, as text; and those that its edge cuts off.
_OVERLAPS = """() => [...document.querySelectorAll(".plot")].flatMap((plot) => {
  const all = [...plot.querySelectorAll("text")].map((x) => [x.textContent, x.getBoundingClientRect()]);
  return all.flatMap(([a, p], i) => all.slice(i + 1).filter(([b, q]) =>
    p.left + 0.5 < q.right && q.left + 0.5 < p.right && p.top + 3 < q.bottom && q.top + 3 < p.bottom
  ).map(([b]) => `${plot.getAttribute("aria-label")}: ${a} over ${b}`));
})"""
_CUT = """() => [...document.querySelectorAll(".plot")].flatMap((plot) => {
  const edge = plot.getBoundingClientRect();
  return [...plot.querySelectorAll("text")].filter((x) => {
    const box = x.getBoundingClientRect();
    return box.left < edge.left - 1 || box.right > edge.right + 1 || box.top < edge.top - 1 ||
      box.bottom > edge.bottom + 1;
  }).map((x) => `${plot.getAttribute("aria-label")}: ${x.textContent}`);
})"""
# The lowest contrast of text with what is behind it, and that text. Figures and widgets are on cards of their own.
_CONTRAST = """() => {
  const rgb = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = (c) => rgb(c).slice(0, 3).map((x) => x / 255)
    .map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + [0.2126, 0.7152, 0.0722][i] * x, 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if (rgb(c).length === 3 || rgb(c)[3] === 1) return c;
    }
    return "rgb(255, 255, 255)";
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let lowest = [99, ""];
  for (let n; (n = walker.nextNode()); ) {
    const e = n.parentElement;
    if (!n.data.trim() || e.closest("script, style, .widget, .plot, title, noscript")) continue;
    const front = getComputedStyle(e).color, back = behind(e);
    const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < lowest[0]) lowest = [ratio, `${n.data} ${front} on ${back}`];
  }
  return lowest;
}"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full report of the demo model on two stretches of its text."""
    target = tmp_path_factory.mktemp("report") / "report.html"
    return tp.report(tp.load_demo_model(), tp.demo_text()[:2500], target, progress=False)


def test_everything_is_drawn(path: Path, opened: Open) -> None:
    page = opened(path)
    page.settle(CANVASES)
    ids = page.page.locator("section").evaluate_all("all => all.map(x => x.id)")
    assert ids == ["atlas", "verdict", "analysed", "headline", *SECTIONS, "reproduce"]
    assert page.page.locator(".plot").count() == 1 + 2 + 5 + 1 + 2 + 1 + 1 + 2
    boxes = page.page.locator(".plot .main-svg").evaluate_all(
        "all => all.map(x => x.getBoundingClientRect()).map(b => [b.width, b.height])"
    )
    assert all(width > 300 and height > 200 for width, height in boxes)
    assert page.page.locator("#distance .plot .scatterlayer path.js-line").count() == 5 * 8
    assert page.page.locator("#shares .plot .point").count() == 40 * 7
    assert page.page.evaluate(_OVERLAPS) == []
    assert page.page.evaluate(_CUT) == []
    ratio, where = page.page.evaluate(_CONTRAST)
    assert ratio >= 4.5, where
    assert len({page.picture(n) for n in range(6)}) == 6  # the components of a head differ
    page.screenshot("report_desktop")


def test_a_cell_says_its_number_and_leads_to_its_head(path: Path, opened: Open) -> None:
    page = opened(path)
    page.settle(CANVASES)
    map_of_r = page.page.locator("#additivity .plot").first
    map_of_r.scroll_into_view_if_needed()
    box = map_of_r.locator(".nsewdrag").bounding_box()
    cell = box["x"] + box["width"] * 4.5 / 8, box["y"] + box["height"] * 3.5 / 5
    page.page.mouse.move(*cell)
    tooltip = map_of_r.locator(".hoverlayer text").first
    tooltip.wait_for()
    where, _, r = tooltip.text_content().partition(": ")
    assert where == "layer 3, head 4"
    page.page.mouse.click(*cell)
    page.page.wait_for_url("**#L3H4")
    row = page.page.locator("#table-atlas tr", has=page.page.locator("#L3H4"))
    assert row.is_visible()
    assert float(row.locator("td").nth(4).inner_text()) == pytest.approx(float(r), abs=6e-4)


def test_the_atlas_is_sorted_by_a_click_on_a_title(path: Path, opened: Open) -> None:
    page = opened(path)
    page.settle(CANVASES)
    rows = page.page.locator("#table-atlas tbody tr")

    def texts(n: int) -> list[str]:
        return [row.locator("th, td").nth(n).inner_text() for row in rows.all()]

    titles = page.page.locator("#table-atlas thead th")
    for title, n in (("distance alone", 3), ("added loss", 7)):
        titles.get_by_text(title, exact=True).click()
        numbers = [float(text.replace("−", "-")) for text in texts(n)]
        assert numbers == sorted(numbers, reverse=True)
        titles.get_by_text(title).press("Enter")
        assert [float(text.replace("−", "-")) for text in texts(n)] == numbers[::-1]
    titles.first.click()
    assert texts(0) == [f"L{layer}H{head}" for layer in range(5) for head in range(8)]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_on_a_phone(dark: bool, path: Path, opened: Open) -> None:
    page = opened(path, width=390, dark=dark)
    page.settle(CANVASES)
    assert page.page.evaluate("() => document.scrollingElement.scrollWidth <= innerWidth")
    for summary in page.page.locator("summary").all():
        summary.click()  # what is folded must not be wider either
    assert page.page.evaluate("() => document.scrollingElement.scrollWidth <= innerWidth")
    assert page.page.evaluate(_OVERLAPS) == []
    small = page.page.locator(".plot text").evaluate_all(
        "all => Math.min(...all.map(x => parseFloat(getComputedStyle(x).fontSize)))"
    )
    assert small >= 9  # pixels
    for summary in page.page.locator("summary").all():
        summary.click()
    page.screenshot(f"report_phone{'_dark' if dark else ''}")


def test_in_the_dark(path: Path, opened: Open) -> None:
    page = opened(path, dark=True)
    page.settle(CANVASES)
    background = page.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert max(map(int, background.removeprefix("rgb(").removesuffix(")").split(","))) < 60
    ratio, where = page.page.evaluate(_CONTRAST)
    assert ratio >= 4.5, where
    cards = page.page.locator(".widget > div, .plot").evaluate_all(
        "all => all.map(x => getComputedStyle(x).backgroundColor)"
    )
    assert set(cards) == {"rgb(255, 255, 255)"}  # charts write in black
    titles = page.page.locator(".widget figcaption").evaluate_all("all => all.map(x => getComputedStyle(x).color)")
    assert set(titles) == {"rgb(34, 34, 34)"}  # on white, not in the page's light grey
    page.screenshot("report_dark")


def test_nothing_runs_that_somebody_adds(path: Path, opened: Open, tmp_path: Path) -> None:
    """The second line of defence, should the first ever fail."""
    target = tmp_path / "changed.html"
    added = f"<script>{ATTACK}</script><img src=x onerror='{ATTACK}'><img src='https://example.org/x.png'></body>"
    target.write_text(path.read_text(encoding="utf-8").replace("</body>", added), encoding="utf-8")
    page = opened(target, may_fail=True)
    page.settle(CANVASES)
    assert page.page.evaluate("() => window.pwned") is None
    refused: dict[str, str] = {}
    page.page.on("requestfailed", lambda request: refused.update({request.url: request.failure}))
    page.page.reload()
    page.settle(CANVASES)
    assert refused == {(tmp_path / "x").as_uri(): "csp", "https://example.org/x.png": "csp"}
    assert sum("Content Security Policy" in complaint for complaint in page.complaints) >= 2
