"""Every widget in a page without a network, as a notebook writes it: drawn, right, and deaf to what tokens say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import tl_posdisent as tp
from tl_posdisent.viz import Widget
from tl_posdisent.viz.palette import NEGATIVE, POSITIVE
from tl_posdisent.viz.widgets.charts import coloured_text, text_token
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


TITLE = f"</title></div>{HOSTILE[0]}{HOSTILE[1]}"


def two_heads() -> tuple[torch.Tensor, tp.AdditiveFit]:
    """Head 0 falls with the distance, head 1 loves the third key: each of them a sum of parts."""
    scores = torch.stack([-1.0 * POINT, 2.0 * (torch.arange(6) == 2).expand(6, 6)])
    return scores, tp.fit_additive(scores)


def notebook(folder: Path, *widgets: Widget) -> Path:
    """A page with what a notebook stores of each widget, and a text after each."""
    path = folder / "notebook.html"
    cells = "".join(f"<p>{widget._repr_html_()}</p><p>after {n}</p>" for n, widget in enumerate(widgets))
    path.write_text(f"<!doctype html><meta charset=utf-8><main>{cells}</main>", encoding="utf-8")
    return path


def test_scores(opened: Open, tmp_path: Path) -> None:
    scores, fit = two_heads()
    page = opened(notebook(tmp_path, tp.show_scores(fit, WORDS, "scores", scores=scores, centred=False, scale=5.0)))
    page.settle(3)  # two small, one in full
    # The small charts have no margins: cell (i, j) is where it should be.
    assert page.pixel(0, 0.5 / 6, 5.5 / 6) == LOW  # -5, the lowest
    assert page.pixel(0, 5.5 / 6, 5.5 / 6) == WHITE  # 0, the same token
    assert page.pixel(0, 5.5 / 6, 0.5 / 6) == GREY  # after the query
    first = page.picture(2)
    assert page.tooltip(2, LOW)[-1] == "Val: -5"
    page.page.get_by_text("H1", exact=True).first.click()
    page.page.mouse.move(0, 0)
    page.page.wait_for_function("() => [...document.querySelectorAll('h3')].some(x => x.textContent === 'H1 Zoomed')")
    page.settle(3)
    assert page.picture(2) != first
    assert page.pixel(1, 2.5 / 6, 5.5 / 6) == page.pixel(1, 2.5 / 6, 2.5 / 6) != WHITE  # the third key, to all


def test_parts(opened: Open, tmp_path: Path) -> None:
    scores = torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(1))
    fit = tp.fit_additive(scores)
    page = opened(notebook(tmp_path, tp.show_parts(fit, WORDS, 1, scores=scores)))
    page.settle(7)
    for name in get_args(ScoreComponent):
        assert page.page.get_by_text(name, exact=True).first.is_visible()
    assert len({page.picture(n) for n in range(6)}) == 6


def test_patterns_and_interventions(opened: Open, tmp_path: Path) -> None:
    scores, fit = two_heads()
    pattern = scores.masked_fill(POINT < 0, -torch.inf).softmax(-1)
    page = opened(notebook(tmp_path, tp.show_patterns(fit, WORDS, pattern, heads=[1], scale=1.0)))
    page.settle(3)
    assert page.picture(0) == page.picture(1)  # these scores are additive
    model, tokens = tp.load_demo_model(), tp.demo_tokens(length=6)
    hooks = tp.dummy_distance(model, 3)
    page = opened(notebook(tmp_path, tp.show_interventions(model, tokens, hooks, layer=4, heads=[2])))
    page.settle(4)
    assert len({page.picture(n) for n in range(3)}) == 3


def test_coloured_text(opened: Open, tmp_path: Path) -> None:
    model, tokens = tp.load_demo_model(), tp.demo_tokens(length=28)
    hooks = tp.dummy_distance(model, 3)
    page = opened(notebook(tmp_path, tp.viz.show_loss_change(model, tokens, hooks)))
    page.screenshot("loss_change")
    shown = page.page.locator(".colored-tokens span > span")
    words = model.to_str_tokens(tokens[0])
    seen = [x.replace("\u2060", "").strip() for x in shown.all_inner_texts()]
    assert seen == [word.replace(" ", "·").replace("\n", "↵") for word in words]
    top = shown.evaluate_all("all => all.map(x => x.getBoundingClientRect().top)")
    line_break = words.index("\n")
    assert top[0] == top[line_break] < top[line_break + 1]  # the text breaks where its token says so
    with torch.no_grad():
        before, after = model(tokens, return_type="loss", loss_per_token=True), None
        with model.hooks(fwd_hooks=hooks):
            after = model(tokens, return_type="loss", loss_per_token=True)
    added = (after - before)[0]
    most = int(added.abs().argmax())
    colours = shown.evaluate_all("all => all.map(x => getComputedStyle(x).backgroundColor)")
    assert colours[most + 1] == "rgb({}, {}, {})".format(*(HIGH if added[most] > 0 else LOW))
    shown.nth(most + 1).hover()
    tooltip = page.page.locator("strong:visible").locator("..").inner_text().split()
    assert float(tooltip[1]) == pytest.approx(added[most].item(), abs=1e-3)


def hostile_matrices() -> Widget:
    length = len(HOSTILE)
    scores = torch.randn(2, length, length, generator=torch.Generator().manual_seed(0))
    return tp.show_scores(tp.fit_additive(scores), HOSTILE, title=TITLE)


def hostile_text() -> Widget:
    tokens = [text_token(token) for token in HOSTILE]
    return coloured_text(torch.linspace(-1, 1, len(tokens)), tokens, scale=1.0, title=TITLE, note="")


@pytest.mark.parametrize("make", [hostile_matrices, hostile_text])
def test_hostile_tokens_are_shown_and_not_run(make: Callable[[], Widget], opened: Open, tmp_path: Path) -> None:
    page = opened(notebook(tmp_path, make()))
    if make is hostile_text:
        tokens = page.page.locator(".colored-tokens span > span")
        tokens.first.wait_for()
        shown = [x.replace("\u2060", "") for x in tokens.all_inner_texts()]
        assert shown[:2] == [HOSTILE[0].replace(" ", "·"), HOSTILE[1]]
        assert shown[2:] == SEEN[2:]
        tokens.first.hover()
        page.page.locator("strong:visible").wait_for()
    else:
        page.settle(3)
        written = [text.replace("\u2060", "") for text in page.page.evaluate("() => window.written")]
        for n, token in enumerate(SEEN):
            assert f"{token} ({n})" in written
    assert page.page.evaluate("() => window.pwned") is None
    assert page.page.get_by_text(TITLE, exact=True).count() == 1
    assert page.page.get_by_text("after 0", exact=True).is_visible()


def test_many_on_one_page(opened: Open, tmp_path: Path) -> None:
    """circuitsvis's library is loaded anew by each, and warns of that."""
    scores, fit = two_heads()
    widgets = [tp.show_scores(fit, WORDS), tp.show_parts(fit, WORDS, 0, scores=scores), tp.show_scores(fit, WORDS)]
    page = opened(notebook(tmp_path, *widgets), may_fail=True)
    page.settle(3 + 7 + 3)
    assert [page.page.get_by_text(f"after {n}").is_visible() for n in range(3)] == [True] * 3
    assert page.picture(2) == page.picture(3 + 7 + 2)
    assert len(page.requests) == 1


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
    page.settle(5)
