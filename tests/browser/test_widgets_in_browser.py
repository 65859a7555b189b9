"""Every widget, opened from disk without a network: drawn, right, silent, and deaf to what tokens say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import tl_posdisent as tp
from tl_posdisent.viz.palette import NEGATIVE, POSITIVE
from tl_posdisent.viz.widgets.offline import Widget
from tl_posdisent.viz.widgets.score_matrices import ScoreComponent

pytestmark = pytest.mark.slow

Open = Callable[..., Any]

WHITE, GREY = (255, 255, 255), (200, 200, 200)
HIGH, LOW = (tuple(bytes.fromhex(colour[1:])) for colour in (POSITIVE, NEGATIVE))
WORDS = ["<s>", " one", " two", "\n", " three", " four"]
POINT = torch.arange(6)[:, None] - torch.arange(6)

ATTACK = "window.pwned = true"
HOSTILE = [
    f"</script><script>{ATTACK}</script>",
    f'<img/src="x"onerror={ATTACK.replace(" ", "")}>',
    "<!--<script>",
    "'\"`\\${}",
    "\u2028\u2029\r",
    "\ud800",
    "<s>",
    "&lt;b&gt;",
    "\u202eback",
    "",
]
SEEN = [  # on an axis, where 24 characters have room
    "</script><script>window…",
    '<img/src="x"onerror=win…',
    "<!--<script>",
    "'\"`\\${}",
    "\\u2028\\u2029\\r",
    "\\ud800",
    "<s>",
    "&lt;b&gt;",
    "\\u202eback",
    "∅",
]


def two_heads() -> tuple[torch.Tensor, tp.AdditiveFit]:
    """Head 0 falls with the distance, head 1 loves the third key: each of them a sum of parts."""
    scores = torch.stack([-1.0 * POINT, 2.0 * (torch.arange(6) == 2).expand(6, 6)])
    return scores, tp.fit_additive(scores)


def saved(widget: Widget, folder: Path, name: str = "widget") -> Path:
    return widget.save(folder / f"{name}.html")


def test_scores(opened: Open, tmp_path: Path) -> None:
    scores, fit = two_heads()
    widget = tp.show_scores(fit, WORDS, "scores", scores=scores, centred=False, scale=5.0)
    page = opened(saved(widget, tmp_path))
    page.settle(3)  # two small, one in full
    page.screenshot("scores")
    # The small charts have no margins: cell (i, j) is where it should be.
    assert page.pixel(0, 0.5 / 6, 5.5 / 6) == LOW  # -5, the lowest
    assert page.pixel(0, 5.5 / 6, 5.5 / 6) == WHITE  # 0, the same token
    assert page.pixel(0, 5.5 / 6, 0.5 / 6) == GREY  # after the query
    first = page.picture(2)
    assert page.tooltip(2, LOW)[-4:] == ["(5, 0)", "key: <s>", "query: ·four ", "Val: -5"]
    said = " ".join(map(str, page.page.evaluate("() => window.written"))).lower()
    assert {"query", "key"} <= set(said.split())
    assert not {"source", "destination", "src:", "dest:"} & set(said.split())
    page.page.get_by_text("H1", exact=True).first.click()
    page.page.mouse.move(0, 0)
    page.page.wait_for_function("() => [...document.querySelectorAll('h3')].some(x => x.textContent === 'H1 Zoomed')")
    page.settle(3)
    assert page.picture(2) != first
    assert page.pixel(1, 2.5 / 6, 5.5 / 6) == page.pixel(1, 2.5 / 6, 2.5 / 6) != WHITE  # the third key, to all


def test_parts(opened: Open, tmp_path: Path) -> None:
    scores = torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(1))
    fit = tp.fit_additive(scores)
    # The darkest cell of all is somewhere, and its number is the scale's.
    parts = {"scores": scores.double() - fit.intercept[..., None, None], "residual": fit.residual(scores)}
    parts |= {name: fit.component(name) for name in ("distance", "query", "key")}
    parts["fitted"] = sum(parts[name] for name in ("distance", "query", "key"))
    values = {name: x[0, 1][POINT >= 0] for name, x in parts.items()}
    name = max(values, key=lambda name: values[name].abs().max())
    extreme = values[name][values[name].abs().argmax()].item()
    page = opened(saved(tp.show_parts(fit, WORDS, 1, scores=scores, scale=abs(extreme)), tmp_path))
    page.settle(6)
    page.screenshot("parts")
    assert page.page.locator("figcaption").all_inner_texts() == list(get_args(ScoreComponent))
    assert len({page.picture(n) for n in range(6)}) == 6
    canvas = page.page.locator("figcaption").all_inner_texts().index(name)
    value = page.tooltip(canvas, HIGH if extreme > 0 else LOW)[-1]
    assert float(value.removeprefix("Val: ")) == pytest.approx(extreme, abs=1e-3)


def test_patterns(opened: Open, tmp_path: Path) -> None:
    scores, fit = two_heads()
    pattern = scores.masked_fill(POINT < 0, -torch.inf).softmax(-1)
    page = opened(saved(tp.show_patterns(fit, WORDS, pattern, scale=1.0), tmp_path))
    page.settle(2)
    page.screenshot("patterns")
    first = page.picture(0)
    assert first == page.picture(1)  # these scores are additive
    page.page.get_by_label("head").select_option("1")
    page.settle(2)
    assert page.picture(0) != first
    value = pattern[1, 2, 2]  # the highest but that of the first row, which sees itself alone
    texts = page.tooltip(0, HIGH)
    assert texts[-4:] == ["(0, 0)", "key: <s>", "query: <s> ", "Val: 1"]
    assert 0.5 < value < 1
    page.page.get_by_label("head").select_option("0")
    page.settle(2)
    assert page.picture(0) == first


def test_coloured_text(opened: Open, tmp_path: Path) -> None:
    _, fit = two_heads()
    page = opened(saved(tp.viz.show_key_importance({3: fit, 7: fit}, WORDS), tmp_path))
    page.screenshot("key_importance")
    tokens = page.page.locator(".colored-tokens >> visible=true").locator("span > span")
    seen = [x.replace("\u2060", "").strip() for x in tokens.all_inner_texts()]
    assert seen == ["<s>", "·one", "·two", "↵", "·three", "·four"]
    top = tokens.evaluate_all("all => all.map(x => x.getBoundingClientRect().top)")
    assert top[0] == top[3] < top[4] == top[5]  # the text breaks where its token says so
    assert page.page.locator("optgroup").evaluate_all("all => all.map(x => x.label)") == ["layer 3", "layer 7"]
    page.page.get_by_label("head").select_option("layer 7, head 1")
    colours = tokens.evaluate_all("all => all.map(x => getComputedStyle(x).backgroundColor)")
    assert colours[2] == "rgb({}, {}, {})".format(*HIGH)  # the loud key is the largest value of all
    tokens.nth(2).hover()
    key = fit.key[1]
    tooltip = page.page.locator("strong:visible").locator("..").inner_text().split()
    assert tooltip[0] == "·two"
    assert float(tooltip[1]) == pytest.approx(key[2].item(), abs=1e-3)
    page.screenshot("key_importance_tooltip")


def hostile_widgets() -> dict[str, Callable[[], Widget]]:
    length = len(HOSTILE)
    scores = torch.randn(2, length, length, generator=torch.Generator().manual_seed(0))
    fit = tp.fit_additive(scores)
    pattern = scores.softmax(-1)
    title = f"</title></div>{HOSTILE[0]}{HOSTILE[1]}"
    return {
        "scores": lambda: tp.show_scores(fit, HOSTILE, title=title),
        "patterns": lambda: tp.show_patterns(fit, HOSTILE, pattern, heads=[1], title=title),
        "key_importance": lambda: tp.viz.show_key_importance(fit, HOSTILE, title=title),
    }


@pytest.mark.parametrize("guarded", [True, False], ids=["saved", "notebook"])
@pytest.mark.parametrize("name", ["scores", "patterns", "key_importance"])
def test_hostile_tokens_are_shown_and_not_run(name: str, guarded: bool, opened: Open, tmp_path: Path) -> None:
    widget = hostile_widgets()[name]()
    path = tmp_path / "hostile.html"
    if guarded:
        widget.save(path)
    else:  # as a notebook does it: no policy protects it there
        path.write_text(f"<!doctype html><meta charset=utf-8><p>before</p>{widget._repr_html_()}<p>after</p>")
    page = opened(path)
    if name == "key_importance":
        tokens = page.page.locator(".colored-tokens").locator("span > span")
        tokens.first.wait_for()
        shown = [x.replace("\u2060", "") for x in tokens.all_inner_texts()]
        assert shown[0] == HOSTILE[0].replace(" ", "·")
        assert shown[1] == HOSTILE[1]
        assert shown[2:] == SEEN[2:]
        tokens.first.hover()
        page.page.locator("strong:visible").wait_for()
    else:
        page.settle(3 if name == "scores" else 2)
        written = page.page.evaluate("() => window.written")
        for n, token in enumerate(SEEN):
            assert f"{token} ({n})" in written
    page.screenshot(f"hostile_{name}")
    assert page.page.evaluate("() => window.pwned") is None
    assert page.page.get_by_text(widget.title, exact=True).count() == 1
    if not guarded:
        assert page.page.get_by_text("after", exact=True).is_visible()


def test_many_on_one_page(opened: Open, tmp_path: Path) -> None:
    """Also the same one twice, as in a notebook that displays it again."""
    scores, fit = two_heads()
    first, second = tp.show_scores(fit, WORDS), tp.show_parts(fit, WORDS, 0, scores=scores)
    parts = [first._repr_html_(), second._repr_html_(), first._repr_html_(), second.fragment()]
    path = tmp_path / "page.html"
    path.write_text("<!doctype html><meta charset=utf-8>" + "".join(f"{x}<p>then {n}</p>" for n, x in enumerate(parts)))
    page = opened(path)
    page.settle(3 + 6 + 3 + 6)
    assert [page.page.get_by_text(f"then {n}").is_visible() for n in range(4)] == [True] * 4
    assert page.picture(2) == page.picture(3 + 6 + 2)


@pytest.mark.parametrize("attached", [True, False], ids=["attached", "detached"])
def test_as_jupyterlab_puts_it_in(attached: bool, opened: Open, tmp_path: Path) -> None:
    """It sets the HTML of an element that may not be in the document yet, and runs each script as a copy of it."""
    path = tmp_path / "page.html"
    path.write_text("<!doctype html><meta charset=utf-8><main></main>")
    page = opened(path)
    page.page.evaluate(
        """([html, attached]) => {
          const host = document.createElement("div"), main = document.querySelector("main");
          if (attached) main.append(host);
          host.innerHTML = html;
          for (const script of host.querySelectorAll("script")) {
            const copy = document.createElement("script");
            for (const { name, value } of script.attributes) copy.setAttribute(name, value);
            copy.textContent = script.textContent;
            script.replaceWith(copy);
          }
          if (!attached) main.append(host);
        }""",
        [tp.show_patterns(two_heads()[1], WORDS, torch.eye(6).expand(2, 6, 6))._repr_html_(), attached],
    )
    page.settle(2)
    page.page.get_by_label("head").select_option("1")
    page.settle(2)


def test_a_saved_widget_is_dark_in_the_dark(tmp_path: Path, opened: Open) -> None:
    """Light and dark change places, red and blue do not."""
    scores, fit = two_heads()
    path = saved(tp.show_parts(fit, WORDS, 0, scores=scores), tmp_path)
    seen = []
    for dark in (False, True):
        page = opened(path, dark=dark)
        page.page.wait_for_function("() => document.querySelectorAll('canvas').length > 0")
        seen.append(page.colour_on_screen("body"))
    light, dark = map(sum, seen)
    assert light > 2.0
    assert dark < 1.0
