"""The report, opened from disk without a network: drawn, legible on a phone and in the dark, and silent."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from playwright.sync_api import expect

import tl_posdisent as tp
from tl_posdisent.page.names import ON_REQUEST, SECTION_NAMES
from tl_posdisent.viz.palette import NEEDS

pytestmark = pytest.mark.slow

Open = Callable[..., Any]

ATTACK = "window.pwned = true"
_OPEN = "(open) => document.querySelectorAll('details').forEach(x => { x.open = open ?? true; })"
# The scripts have run, the last of which defines this function, and all figures are there.
_DRAWN = "() => window.openHead && [...document.querySelectorAll('.plot')].every(x => x.querySelector('.main-svg'))"
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
# The lowest contrast of text with what is behind it, and that text. Figures are on cards of their own.
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
    if (!n.data.trim() || e.closest("script, style, .plot, title, noscript")) continue;
    const front = getComputedStyle(e).color, back = behind(e);
    const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < lowest[0]) lowest = [ratio, `${n.data} ${front} on ${back}`];
  }
  return lowest;
}"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of the demo model on several stretches of its text, made once for all processes of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    target = folder / "report.html"
    with FileLock(folder / "report.lock"):
        if not target.exists():
            tp.report(tp.load_demo_model(), tp.demo_text()[:1600], target, progress=False)
    return target


@pytest.fixture
def shown(path: Path, opened: Open) -> Open:
    """Open the report, or another file, and wait until all of its figures are drawn."""

    def show(target: Path = path, **options: Any) -> Any:
        page = opened(target, **options)
        page.page.wait_for_function(_DRAWN)
        return page

    return show


def test_everything_is_drawn(shown: Open) -> None:
    page = shown()
    ids = page.page.locator("section").evaluate_all("all => all.map(x => x.id)")
    first, *others = [name for name in SECTION_NAMES if name != ON_REQUEST]
    assert ids == [first, "atlas", *others, "reproduce"]
    page.page.evaluate(_OPEN)
    assert page.page.locator(".plot").count() == 6
    boxes = page.page.locator(".plot .main-svg").evaluate_all(
        "all => all.map(x => x.getBoundingClientRect()).map(b => [b.width, b.height])"
    )
    assert all(width > 300 and height > 200 for width, height in boxes)
    assert page.page.locator("#distance .plot .scatterlayer path.js-line").count() == 40
    assert page.page.locator("#shares .plot .point").count() == 40 * 7
    assert page.page.evaluate(_OVERLAPS) == []
    assert page.page.evaluate(_CUT) == []
    ratio, where = page.page.evaluate(_CONTRAST)
    assert ratio >= 4.5, where
    page.screenshot("report_desktop")


def test_a_cell_says_its_number_and_leads_to_its_head(shown: Open) -> None:
    page = shown()
    page.page.get_by_role("link", name="What the scores look like").click()
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
    expect(page.page.locator("#panel h3")).to_have_text("L3H4")
    titles = page.page.locator("#table-atlas thead th").all_inner_texts()
    assert float(row.locator("td").nth(titles.index("held-out r") - 1).inner_text()) == pytest.approx(
        float(r), abs=6e-4
    )


def test_the_atlas_is_sorted_by_a_click_on_a_title(shown: Open) -> None:
    page = shown()
    rows = page.page.locator("#table-atlas tbody tr")

    def texts(n: int) -> list[str]:
        return [row.locator("th, td").nth(n).inner_text() for row in rows.all()]

    for which in ("columns", "rows"):
        page.page.locator(f"#atlas .{which}").check()
    titles = page.page.locator("#table-atlas thead th")
    named = [text.rstrip(" ▲▼") for text in titles.all_inner_texts()]
    contributions = [float(text) for text in texts(named.index("contribution"))]
    assert contributions == sorted(contributions, reverse=True)  # before any click
    for title in ("distance alone", "contribution"):
        n = named.index(title)
        titles.get_by_text(title, exact=True).click()
        numbers = [float(text.replace("−", "-")) for text in texts(n)]
        assert numbers == sorted(numbers, reverse=True)
        titles.get_by_text(title, exact=True).press("Enter")
        assert [float(text.replace("−", "-")) for text in texts(n)] == numbers[::-1]
    titles.first.click()
    assert texts(0) == [f"L{layer}H{head}" for layer in range(5) for head in range(8)]


def test_menus_choose_colours_and_axes(shown: Open) -> None:
    """Colours and points are those of the numbers in the table; all works by keyboard."""
    page = shown()
    plot, rows = page.page.locator("#atlas .plot").first, page.page.locator("#table-atlas tbody tr")
    titles = page.page.locator("#table-atlas thead th").all_inner_texts()
    labels = rows.locator("a").all_inner_texts()
    number = {
        title: [float(x.replace("−", "-")) for x in rows.locator(f"td:nth-of-type({n})").all_inner_texts()]
        for n, title in enumerate(titles)
        if title in ("contribution", "distance alone", "key alone")
    }
    assert page.page.get_by_label("Vertical axis").is_disabled()
    ground = "() => document.querySelector('#atlas .plot')._fullLayout.plot_bgcolor"  # of heads that are not measured
    assert page.page.evaluate(ground) not in NEEDS.values()
    page.page.get_by_role("combobox", name="Colour").select_option(label="contribution (nats per token)")
    assert page.page.evaluate(ground) == "#b9b9b9"
    (drawn,) = page.page.evaluate(
        "() => document.querySelector('#atlas .plot')._fullData.map(trace => [...trace.z].map(r => [...r]))"
    )
    by_label = dict(zip(labels, number["contribution"], strict=True))
    in_order = [by_label[f"L{layer}H{head}"] for layer in range(5) for head in range(8)]
    assert [number for row in drawn for number in row] == pytest.approx(in_order, abs=6e-5)
    assert plot.get_attribute("aria-label") == "contribution (nats per token), by head"
    across = page.page.get_by_label("Horizontal axis")
    across.focus()
    for _ in range(6):
        across.press("ArrowDown")  # from the map over the parts, joint and the contribution
    page.page.get_by_label("Vertical axis").select_option(label="key alone (share of variance)")
    points = page.page.evaluate(
        "() => document.querySelector('#atlas .plot')._fullData.filter(t => t.x.length)"
        ".map(t => [[...t.x], [...t.y], [...t.marker.color]])"
    )
    ((x, y, colour),) = points  # every head has a number
    assert x == pytest.approx(number["distance alone"], abs=6e-4)
    assert y == pytest.approx(number["key alone"], abs=6e-4)
    assert colour == pytest.approx(number["contribution"], abs=6e-5)
    page.page.get_by_role("combobox", name="Colour").select_option(label="What the contribution needs")
    most = number["key alone"].index(max(number["key alone"]))
    point = plot.locator(".scatterlayer .trace path.point").nth(most)
    box = point.bounding_box()
    page.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    label = labels[most]
    plot.locator(".hoverlayer text").first.wait_for()
    assert plot.locator(".hoverlayer text").first.text_content().startswith(label)
    page.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.page.wait_for_url(f"**#{label}")
    expect(page.page.locator("#panel h3")).to_have_text(label)
    across.select_option("map")
    assert plot.get_attribute("aria-label") == "What the contribution needs, by head"
    assert page.page.evaluate(_OVERLAPS) == []


@pytest.mark.parametrize("width", [1100, 390])
def test_axes_are_different_measures(width: int, shown: Open) -> None:
    """Choosing the measure of the other axis exchanges them; no title is cut."""
    page = shown(width=width)
    across, up = (page.page.get_by_label(f"{name} axis") for name in ("Horizontal", "Vertical"))
    plot = page.page.locator("#atlas .plot").first
    shown = []
    for menu, choice in (
        (across, "where_part"),
        (across, "what_part"),
        (up, "what_part"),
        (up, "contribution"),
        (across, "map"),
    ):
        menu.select_option(choice)
        shown.append((across.input_value(), up.input_value()))
        expect(plot.locator(".main-svg").first).to_have_css("height", "254px" if choice == "map" else "420px")
        assert page.page.evaluate(_CUT) == []
        assert page.page.evaluate(_OVERLAPS) == []
    assert shown == [
        ("where_part", "what_part"),
        ("what_part", "where_part"),
        ("where_part", "what_part"),
        ("where_part", "contribution"),
        ("map", "contribution"),
    ]
    across.select_option("contribution")
    assert (across.input_value(), up.input_value()) == ("contribution", "where_part")
    expect(plot.locator(".ytitle")).to_have_text("where(part of the contribution)")  # in two lines


# Where on the page the marker of a head is, in CSS pixels from the figure's corner.
_MARKER = """(plot, label) => {
  const { xaxis, yaxis } = plot._fullLayout;
  for (const { x, y, customdata } of plot._fullData) {
    const n = (customdata ?? []).findIndex(([name]) => name === label);
    if (n >= 0) return [xaxis._offset + xaxis.d2p(x[n]), yaxis._offset + yaxis.d2p(y[n])];
  }
}"""


@pytest.mark.parametrize("width", [1100, 390])
def test_a_click_in_the_plane_opens_the_panel(width: int, shown: Open) -> None:
    """Of the head that is labelled there; a second click leads to it again."""
    page = shown(width=width)
    plane = page.page.locator("#where_or_what .plot").first
    labels = plane.locator(".textpoint text, .annotation-text").filter(has_text=re.compile(r"^L\d")).all_text_contents()
    largest, *others = page.page.locator("#table-atlas tbody tr a").all_inner_texts()[:8]
    assert {*labels} == {largest, *others}  # at any width
    for _ in range(2):
        plane.scroll_into_view_if_needed()
        (x, y), box = plane.evaluate(_MARKER, largest), plane.bounding_box()
        page.page.mouse.click(box["x"] + x, box["y"] + y)
        page.page.wait_for_url(f"**#{largest}")
        expect(page.page.locator("#panel h3")).to_have_text(largest)
        expect(page.page.locator("#panel")).to_be_in_viewport()
        page.page.evaluate("() => scrollTo(0, 0)")


def test_undecided_heads_have_a_mark(shown: Open) -> None:
    """And a click on it opens the panel of the head."""
    page = shown()
    rows = page.page.locator("#table-atlas tbody tr")
    verdicts = dict(
        zip(rows.locator("a").all_inner_texts(), rows.locator("td:nth-of-type(1)").all_inner_texts(), strict=True)
    )
    lines = page.page.locator("#atlas .plot .scatterlayer path.point")
    marked = [label for label, verdict in verdicts.items() if verdict in ("undecided", "not used")]
    assert lines.count() == len(marked) > 0
    undecided = [label for label in sorted(marked) if verdicts[label] == "undecided"]
    lines.first.scroll_into_view_if_needed()
    box = page.page.locator("#atlas .plot .nsewdrag").bounding_box()
    layer, head = int(undecided[0][1]), int(undecided[0][3])
    page.page.mouse.click(box["x"] + box["width"] * (head + 0.5) / 8, box["y"] + box["height"] * (layer + 0.5) / 5)
    page.page.wait_for_url(f"**#{undecided[0]}")
    expect(page.page.locator("#panel h3")).to_have_text(undecided[0])


def test_the_map_by_keyboard(shown: Open) -> None:
    """Arrow keys choose a head, whose numbers are below the map, up to the edge; Enter opens its panel."""
    page = shown()
    plot, said = page.page.locator("#atlas .plot").first, page.page.locator("#atlas figure:has(.plot) output")
    page.page.get_by_label("Horizontal axis").focus()
    page.page.keyboard.press("Tab")
    assert said.inner_text().startswith("L0H0; verdict: ")
    for key in ("ArrowUp", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        page.page.keyboard.press(key)
    assert said.inner_text().startswith("L2H1; verdict: ")
    cells, ring = (page.page.locator(f"#atlas {x}").bounding_box() for x in (".nsewdrag", ".ring:visible"))
    for side, start, size, at in (("width", "x", cells["width"] / 8, 1), ("height", "y", cells["height"] / 5, 2)):
        assert ring[side] == pytest.approx(size, abs=1)
        assert ring[start] == pytest.approx(cells[start] + at * size, abs=1)
    page.page.keyboard.press("Enter")
    page.page.wait_for_url("**#L2H1")
    expect(page.page.locator("#panel h3")).to_have_text("L2H1")
    plot.focus()
    for _ in range(9):
        page.page.keyboard.press("ArrowRight")
    assert said.inner_text().startswith("L2H7; verdict: ")
    for key, label in (("Home", "L2H0"), ("End", "L2H7")):
        page.page.keyboard.press(key)
        assert said.inner_text().startswith(f"{label}; verdict: ")


@pytest.mark.parametrize("figure", ["map", "plane", "scatter plot"])
def test_arrow_keys_lead_from_each_head_to_all_others(figure: str, shown: Open) -> None:
    """To one that lies in the direction of the key; Home and End to the outermost."""
    page = shown()
    if figure == "scatter plot":
        page.page.get_by_label("Horizontal axis").select_option("share_distance")
    plot = page.page.locator(f"#{'where_or_what' if figure == 'plane' else 'atlas'} .plot")
    n_heads, reached, sideways = plot.evaluate(
        """(plot) => {
          const all = marksOf(plot), moves = Object.values(steps), reached = new Set([all[0]]), wrong = [];
          for (const from of reached) for (const [right, down] of moves) {
            const to = nearest(all, from, [right, down]);
            if ((to.x - from.x) * right + (to.y - from.y) * down < -0.5) wrong.push([from.label, to.label]);
            reached.add(to);
          }
          return [all.length, reached.size, wrong];
        }"""
    )
    assert (n_heads, reached, sideways) == (40, 40, [])


@pytest.mark.parametrize("width", [1100, 390])
def test_what_is_said_below_a_figure_is_what_one_reads_by_pointing(width: int, shown: Open) -> None:
    """Of each head in the plane and in the map, in the digits of plotly; and no text is too high to be shown."""
    page = shown(width=width)
    for figure in ("where_or_what", "atlas"):
        differences = page.page.locator(f"#{figure} .plot").evaluate(
            """(plot) => marksOf(plot).map((mark) => {
              const said = textOf(plot, mark), [xval, yval] = [mark.pointNumber[1], mark.pointNumber[0]];
              Plotly.Fx.unhover(plot);
              Plotly.Fx.hover(plot, [{ curveNumber: mark.curveNumber, ...(mark.cell ? { xval, yval } : mark) }]);
              const lines = [...plot.querySelectorAll(".hovertext .line")].map((line) => line.textContent);
              Plotly.Fx.unhover(plot);
              return [said.replaceAll("−", "-"), lines.join("; ")];
            }).filter(([one, other]) => one !== other)"""
        )
        assert differences == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_what_is_chosen_is_framed_beside_its_numbers(width: int, dark: bool, shown: Open) -> None:
    """By keyboard, in the plane: the frame, the numbers and the figure are in view; Enter, and Escape back."""
    page = shown(width=width, dark=dark)
    figure = page.page.locator("#where_or_what figure")
    plane, said, ring = (figure.locator(x) for x in (".plot", "output", ".ring"))
    while not plane.evaluate("x => x === document.activeElement"):
        page.page.keyboard.press("Tab")
    largest = page.page.locator("#table-atlas tbody tr a").first.inner_text()
    assert said.inner_text().startswith(f"{largest}: ")
    for key in ("Home", "ArrowRight", "ArrowUp", "End", "ArrowLeft"):
        page.page.keyboard.press(key)
        label, _, numbers = said.inner_text().partition(": ")
        assert "standard error over texts" in numbers
        (x, y), corner, frame = plane.evaluate(_MARKER, label), plane.bounding_box(), ring.bounding_box()
        middle = frame["x"] + frame["width"] / 2 - corner["x"], frame["y"] + frame["height"] / 2 - corner["y"]
        assert middle == pytest.approx((x, y), abs=2)
        expect(ring).to_be_in_viewport(ratio=1)
        expect(said).to_be_in_viewport(ratio=1)
        assert frame["y"] + frame["height"] < said.bounding_box()["y"]
    style = ring.evaluate("x => [getComputedStyle(x).borderTopColor, getComputedStyle(x).outlineColor]")
    assert style == ["rgb(0, 0, 0)", "rgb(255, 255, 255)"]  # black between white: in grey on every colour
    assert figure.evaluate("x => getComputedStyle(x).outlineStyle") == "solid"  # the focus
    page.screenshot(f"report_chosen_{width}{'_dark' if dark else ''}")
    page.page.keyboard.press("Enter")
    page.page.wait_for_url(f"**#{label}")
    expect(page.page.locator("#panel")).to_be_focused()
    row = page.page.locator("#table-atlas tr", has=page.page.locator(f"#{label}"))
    assert "inset" in row.locator("td").first.evaluate("x => getComputedStyle(x).boxShadow")  # lines, not only a colour
    page.page.keyboard.press("Escape")
    expect(plane).to_be_focused()


def test_each_figure_is_one_stop_of_the_tab_key(shown: Open) -> None:
    """With all sections and a panel open; and so is the score map."""
    page = shown()
    page.page.evaluate(_OPEN)
    page.page.locator("#table-atlas tbody tr a").first.click()
    page.page.locator("h1").click()
    figures = page.page.locator("figure:visible")
    stops = figures.evaluate_all(
        "all => all.map(x => [...x.querySelectorAll('*')].filter(y => y.tabIndex >= 0 && y.checkVisibility()).length)"
    )
    assert stops == [1] * 9
    reached: list[int] = []
    while not reached or page.page.evaluate("() => document.activeElement !== document.body"):
        page.page.keyboard.press("Tab")
        reached.append(figures.evaluate_all("all => all.findIndex(x => x.contains(document.activeElement))"))
    assert [n for n in reached if n >= 0] == [*range(9)]
    assert len(reached) < 100


def test_each_table_of_heads_leads_to_their_panels(shown: Open) -> None:
    """Also for the second time; and Escape leads back to the link."""
    page = shown()
    page.page.evaluate(_OPEN)
    link = page.page.locator("#table-labels tbody a").nth(2)
    for _ in range(2):
        link.focus()
        link.press("Enter")
        expect(page.page.locator("#panel h3")).to_have_text(link.inner_text())
        expect(page.page.locator("#panel h3")).to_be_in_viewport()
        page.page.keyboard.press("Escape")
        expect(link).to_be_focused()


def test_the_score_map_by_keyboard(shown: Open) -> None:
    page = shown()
    page.page.locator("#table-atlas tbody tr a").first.click()
    canvas, said = (page.page.locator(f"#panel .scores {x}") for x in ("canvas", "output"))
    canvas.focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.page.keyboard.press(key)
    assert "(2), key “" in said.inner_text()
    assert "(1): score " in said.inner_text()
    page.page.keyboard.press("End")
    assert said.inner_text().endswith("(47): masked")
    expect(page.page.locator("#panel .scores .ring")).to_be_visible()


def test_a_finger_chooses_before_it_opens(path: Path, browser: Any) -> None:
    """The first touch of a marker shows its numbers below the figure, the second opens the panel."""
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, offline=True)
    page = context.new_page()
    page.goto(path.as_uri())
    page.wait_for_function(_DRAWN)
    plane, said = page.locator("#where_or_what .plot"), page.locator("#where_or_what figure output")
    largest = page.locator("#table-atlas tbody tr a").first.inner_text()
    for opens in (False, True):
        plane.scroll_into_view_if_needed()
        (x, y), box = plane.evaluate(_MARKER, largest), plane.bounding_box()
        page.touchscreen.tap(box["x"] + x, box["y"] + y)
        expect(said).to_contain_text(f"{largest}: ")
        (expect(page.locator("#panel")) if opens else expect(said)).to_be_in_viewport()
        assert page.locator("#panel").is_visible() == opens
        assert plane.evaluate("x => x._fullLayout.yaxis.range") == [-0.11, 1.13]  # it is no double click
    context.close()


def test_sections_that_panels_repeat_are_closed(shown: Open) -> None:
    """Their first sentence is there; a link opens them, also for the second time, and so does paper."""
    page = shown()
    closed = page.page.locator("details.more")
    names = closed.evaluate_all("all => all.map(x => x.parentElement.id)")
    assert names == ["additivity", "distance", "labels"]
    for name in names:
        assert page.page.locator(f"#{name} > p").first.is_visible()
        more, link = page.page.locator(f"#{name} > .more"), page.page.locator(f"nav a[href='#{name}']")
        for _ in range(2):
            assert more.get_attribute("open") is None
            link.click()
            expect(more).to_have_attribute("open", "")
            more.locator("summary").first.click()
    opened_by_print = (
        "() => { dispatchEvent(new Event('{}print')); return document.querySelectorAll('details[open]').length }"
    )
    n_all = page.page.locator("details").count()
    assert page.page.evaluate(opened_by_print.replace("{}", "before")) == n_all
    assert page.page.locator("#distance .plot").bounding_box()["width"] > 600
    assert page.page.evaluate(opened_by_print.replace("{}", "after")) == 0
    page = shown(may_fail=True)  # the file is asked for again
    page.page.evaluate("() => { location.hash = 'distance' }")
    page.page.reload()
    expect(page.page.locator("#distance > .more")).to_have_attribute("open", "")
    plot, width = page.page.locator("#distance .main-svg").first, page.page.locator("#distance").bounding_box()["width"]
    page.page.wait_for_function(_DRAWN)
    assert plot.bounding_box()["width"] == pytest.approx(width, abs=3)


def test_the_panel_of_a_head(shown: Open) -> None:
    """It has the numbers of the row, the scores of the head, and the tokens; a row is not hidden by the titles."""
    page, model = shown(), tp.load_demo_model()
    tokens = model.to_tokens(tp.demo_text()[:1600], truncate=False)[:, :48]
    scores = tp.capture(model, tokens, layers=[2])[0].scores[0, 5]
    assert not page.page.locator("#panel").is_visible()
    page.page.locator("#atlas .rows").check()
    row = page.page.locator("#table-atlas tr", has=page.page.locator("#L2H5"))
    row.locator("td").nth(2).click()
    page.page.wait_for_url("**#L2H5")
    page.settle(1)
    panel = page.page.locator("#panel")
    expect(panel.locator("h3")).to_have_text("L2H5")
    assert panel.locator("dd").all_inner_texts() == row.locator("td").all_inner_texts()
    says = panel.locator(".says p").all_inner_texts()
    assert says[0].startswith("L2H5 contributes ")
    assert any(sentence.startswith("Of the variance of its scores") for sentence in says)
    titles = page.page.locator("#table-atlas thead th").all_inner_texts()
    assert panel.locator("dt").all_inner_texts() == titles[1:]
    canvas = panel.locator("canvas")
    canvas.scroll_into_view_if_needed()
    box, width = canvas.bounding_box(), 620
    for query, key in ((20, 3), (47, 46)):
        cell = (width - 74) / 48
        place = ((74 + (key + 0.5) * cell) / width, (query + 0.5) * cell / width)
        page.page.mouse.move(box["x"] + place[0] * box["width"], box["y"] + place[1] * box["height"])
        said = panel.locator(".scores output").inner_text()
        words = [model.to_str_tokens(tokens[0])[n] for n in (query, key)]
        assert said.startswith(f"query “{words[0]}” ({query}), key “{words[1]}” ({key}): score ")
        step = float(scores[scores.isfinite()].max() - scores[scores.isfinite()].min()) / 254
        found = float(said.rsplit(" ", 1)[1].replace("−", "-"))
        assert found == pytest.approx(float(scores[query, key]), abs=step + 0.01)
    page.page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 0.02 * box["height"])
    assert panel.locator(".scores output").inner_text().endswith("masked")
    caption = "The replacement behind “what” is another one: of this head alone, at the best of three distances"
    expect(panel.locator(".attention figcaption")).to_contain_text(caption)
    page.screenshot("report_panel")
    for label in ("L4H7", "L0H0", "L3H1"):
        page.page.evaluate("(label) => { location.hash = label }", label)
        page.page.wait_for_function("(label) => document.querySelector('#panel h3').textContent === label", arg=label)
        hidden = page.page.evaluate(
            """(label) => document.getElementById(label).getBoundingClientRect().top -
            document.querySelector("#table-atlas thead").getBoundingClientRect().bottom""",
            label,
        )
        assert hidden >= 0


@pytest.mark.parametrize(("width", "most"), [(1280, 8), (390, 5)])
def test_tables_fit_and_have_more_columns_and_rows_on_request(width: int, most: int, shown: Open) -> None:
    page = shown(width=width)
    page.page.evaluate(_OPEN)
    seen = page.page.locator(".table").evaluate_all(
        """all => all.map(x => [x.querySelector("table").id, x.querySelector("table").offsetWidth, x.offsetWidth,
        [...x.querySelector("thead tr").cells].filter(y => y.offsetWidth).length,
        [...x.querySelectorAll("tbody tr")].filter(y => y.offsetHeight).length])"""
    )
    assert len(seen) == 6
    for name, _, _, columns, rows in seen:
        assert (columns <= most, rows <= 20) == (True, True), name
    assert [one for one in seen if one[1] > one[2]] == []
    hints = page.page.locator(".choices label:has(.columns):visible").evaluate_all(
        "all => all.map(x => [x.closest('.table').querySelector('table').id, getComputedStyle(x, '::after').content])"
    )
    assert hints
    shown_columns = {name: columns for name, _, _, columns, _ in seen}
    assert hints == [[name, f'" ({shown_columns[name]} are shown)"'] for name, _ in hints]
    atlas, verdicts = (page.page.locator(f"#table-atlas {x}") for x in ("thead th:visible", "tbody tr:visible"))
    words = verdicts.locator("td:nth-of-type(1)").all_inner_texts()
    assert len(words) == 20
    assert set(words) <= set(NEEDS)
    page.page.locator("#atlas .columns").check()
    page.page.locator("#atlas .rows").check()
    assert (atlas.count(), verdicts.count()) == (25, 40)
    assert page.page.locator(".scroll").evaluate_all("all => all.every(x => x.scrollHeight <= x.clientHeight + 1)")
    page.page.locator("#atlas .rows").uncheck()
    last = page.page.locator("#table-atlas tbody tr").last.locator("a").inner_text()
    page.page.evaluate("(label) => { location.hash = label }", last)
    expect(verdicts).to_have_count(21)  # that of the link


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_on_a_phone(dark: bool, shown: Open) -> None:
    page = shown(width=390, dark=dark)
    assert page.page.evaluate("() => document.scrollingElement.scrollWidth <= innerWidth")
    page.page.evaluate(_OPEN)  # what is folded must not be wider either
    assert page.page.evaluate("() => document.scrollingElement.scrollWidth <= innerWidth")
    box = page.page.locator("#where_or_what .scroll")
    assert box.evaluate("x => x.scrollWidth <= x.clientWidth")  # the answer is whole
    assert page.page.evaluate(_OVERLAPS) == []
    small = page.page.locator(".plot text").evaluate_all(
        "all => Math.min(...all.map(x => parseFloat(getComputedStyle(x).fontSize)))"
    )
    assert small >= 9  # pixels
    page.page.evaluate(_OPEN, False)
    page.screenshot(f"report_phone{'_dark' if dark else ''}")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_box_that_scrolls_has_a_shadow_where_there_is_more(dark: bool, shown: Open) -> None:
    page = shown(width=390, dark=dark)
    ground = page.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.page.evaluate(_OPEN)
    for columns in page.page.locator(".table .columns").all()[1:]:  # the first table fits, the others do not
        columns.check()
    kinds = []
    for box in page.page.locator(".table .scroll:visible").all():
        for place in ("0", "(e.scrollWidth - e.clientWidth) / 2", "e.scrollWidth"):
            box.evaluate(f"e => e.scrollTo({place}, 0)")
            before, after = box.evaluate("e => [e.scrollLeft, e.scrollWidth - e.clientWidth - e.scrollLeft]")
            shadows = tuple(share < 0.5 for share in page.shares_at_edges(box, ground))
            assert shadows == (before >= 1, after >= 1), box.get_attribute("aria-label")
            kinds.append(shadows)
    assert set(kinds) == {(False, False), (False, True), (True, True), (True, False)}
    page.screenshot(f"report_phone_scrolled{'_dark' if dark else ''}")


def test_in_the_dark(shown: Open) -> None:
    page = shown(dark=True)
    background = page.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert max(map(int, background.removeprefix("rgb(").removesuffix(")").split(","))) < 60
    ratio, where = page.page.evaluate(_CONTRAST)
    assert ratio >= 4.5, where
    cards = page.page.locator(".plot").evaluate_all("all => all.map(x => getComputedStyle(x).backgroundColor)")
    assert set(cards) == {"rgb(255, 255, 255)"}  # charts write in black
    light = shown()
    for one in (page, light):
        one.page.evaluate(_OPEN)
    assert sum(page.colour_on_screen("#distance .plot")) < 1.0  # and what is seen of a card is inverted
    assert sum(light.colour_on_screen("#distance .plot")) > 2.0
    page.screenshot("report_dark")


def test_nothing_runs_that_somebody_adds(path: Path, shown: Open, tmp_path: Path) -> None:
    """The second line of defence, should the first ever fail."""
    target = tmp_path / "changed.html"
    added = f"<script>{ATTACK}</script><img src=x onerror='{ATTACK}'><img src='https://example.org/x.png'></body>"
    target.write_text(path.read_text(encoding="utf-8").replace("</body>", added), encoding="utf-8")
    page = shown(target, may_fail=True)
    assert page.page.evaluate("() => window.pwned") is None
    refused: dict[str, str] = {}
    page.page.on("requestfailed", lambda request: refused.update({request.url: request.failure}))
    page.page.reload()
    page.page.wait_for_function(_DRAWN)
    assert refused == {(tmp_path / "x").as_uri(): "csp", "https://example.org/x.png": "csp"}
    assert sum("Content Security Policy" in complaint for complaint in page.complaints) >= 2
