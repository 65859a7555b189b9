"""Colour bars of heat maps, labels of the where–what plane: no text covers another or is cut off, at several sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

import tl_posdisent as tp
from tl_posdisent.viz import plot_subspaces, plot_verdicts, plot_where_or_what

pytestmark = pytest.mark.slow

SIZES = [(380, 320), (500, 300), (700, 450), (1000, 800)]
HEADS = pd.DataFrame([(layer, head) for layer in range(4) for head in range(8)], columns=["layer", "head"])

# By figure: labels of its colour bar that lie over each other (they may touch), and those that its edge cuts off.
_COLLISIONS = """() => [...document.querySelectorAll(".js-plotly-plot")].map((plot) => {
  const edge = plot.getBoundingClientRect(), bar = plot.querySelector(".colorbar");
  const all = [...bar.querySelectorAll("text")].map((x) => [x.textContent, x.getBoundingClientRect()]);
  const over = all.flatMap(([a, p], i) => all.slice(i + 1).filter(([b, q]) =>
    p.left < q.right && q.left < p.right && p.top + 3 < q.bottom && q.top + 3 < p.bottom
  ).map(([b]) => `${a} over ${b}`));
  const cut = all.filter(([a, p]) => p.left < edge.left || p.right > edge.right || p.top < edge.top).map(([a]) => a);
  return [all.length, ...over, ...cut];
})"""


def figures() -> dict[str, go.Figure]:
    """Signed and unsigned colours, short and long titles, and verdicts."""
    model, tokens = tp.load_demo_model(), tp.demo_tokens(length=64)
    share = HEADS.assign(share_distance=np.linspace(0, 0.53, len(HEADS)))
    effect = HEADS.assign(baseline=3.0, effect=np.linspace(-0.03, 0.05, len(HEADS)))
    effect.attrs["metric"] = "loss"
    verdicts = HEADS.assign(verdict=["static", "distance", "more than additive", "no effect"] * 8, gap=0.1)
    return {
        "a share": tp.plot_heads(share, "share_distance"),
        "a change": tp.plot_heads(effect, "effect"),
        "a change, cut": tp.plot_heads(effect, "effect", limits=(-0.001, 0.002)),
        "r": tp.plot_heads(HEADS.assign(r=0.9), "r"),
        "subspaces": plot_subspaces(tp.subspace_patterns(model, tokens, progress=False)),
        "verdicts": plot_verdicts(verdicts),
    }


def page_of(figures: Iterable[go.Figure], path: Path, opened: Callable[..., Any]) -> Any:
    """Open a page of these figures, with the library once."""
    html = "".join(
        figure.to_html(full_html=False, include_plotlyjs=number == 0) for number, figure in enumerate(figures)
    )
    path.write_text(f'<!doctype html><meta charset="utf-8">{html}', encoding="utf-8")
    return opened(path, width=1100)


def test_the_title_of_a_colour_bar_covers_no_tick(opened: Callable[..., Any], tmp_path: Path) -> None:
    drawn = {
        (name, *size): go.Figure(figure).update_layout(width=size[0], height=size[1])
        for name, figure in figures().items()
        for size in SIZES
    }
    page = page_of(drawn.values(), tmp_path / "plots.html", opened)
    page.page.wait_for_function(f"() => document.querySelectorAll('.colorbar text').length >= {2 * len(drawn)}")
    for case, (n_labels, *wrong) in zip(drawn, page.page.evaluate(_COLLISIONS), strict=True):
        assert n_labels >= 3, case
        assert wrong == [], case


# By figure: texts that lie over each other, that lie over a large marker that is not their own (plotly draws
# the markers and the labels of a trace in the same order), or that the figure's edge cuts off.
_LABELS = """() => [...document.querySelectorAll(".js-plotly-plot")].map((plot) => {
  const edge = plot.getBoundingClientRect();
  const box = (x) => x.getBoundingClientRect();
  const meet = (p, q) =>
    p.left + 0.5 < q.right && q.left + 0.5 < p.right && p.top + 3 < q.bottom && q.top + 3 < p.bottom;
  const texts = [...plot.querySelectorAll("text")].filter((x) => x.textContent);
  const markers = [...plot.querySelectorAll(".trace:has(.textpoint)")].flatMap((trace) => {
    const names = [...trace.querySelectorAll(".textpoint")].map((x) => x.textContent);
    const points = [...trace.querySelectorAll("path.point")].map((x, n) => [names[n], box(x)]);
    return points.filter(([, b]) => b.width >= 8.5);
  });
  const labels = [...plot.querySelectorAll(".textpoint text, .annotation-text")]
    .filter((x) => /^L\\d/.test(x.textContent));
  const over = texts.flatMap((a, n) => texts.slice(n + 1).filter((b) => meet(box(a), box(b)))
    .map((b) => `${a.textContent} over ${b.textContent}`));
  const hidden = labels.flatMap((x) => markers.filter(([name, b]) => name !== x.textContent && meet(box(x), b))
    .map(([name]) => `${x.textContent} over the marker of ${name}`));
  const cut = texts.filter((x) => { const b = box(x); return b.left < edge.left || b.right > edge.right ||
    b.top < edge.top || b.bottom > edge.bottom; }).map((x) => `${x.textContent} is cut`);
  return [labels.length, markers.length, ...over, ...hidden, ...cut];
})"""


PLANES = [((340, 300), True), *((size, given) for size in [(500, 440), *SIZES[2:]] for given in (True, False))]


def test_texts_of_the_plane_cover_nothing(opened: Callable[..., Any], tmp_path: Path) -> None:
    """Of figures made for their width, and of figures for any width."""
    chance = np.random.default_rng(0)
    names = ["where_part", "what_part", "neither_part"]
    parts = [dict(zip(names, chance.dirichlet([0.5] * 3, len(HEADS)).T, strict=True)) for _ in range(2)]
    verdicts = ["where", "what", "mixed", "neither", "undecided", "not used", "mixed", "what"] * 4
    numbers = {"contribution": chance.exponential(size=len(HEADS)), "joint": chance.uniform(size=len(HEADS))}
    before, after = (HEADS.assign(**one, **numbers, verdict=verdicts) for one in parts)
    drawn = []
    for (width, height), is_given in PLANES:
        options: dict[str, Any] = {"height": height, "width": width if is_given else None}
        figure = plot_where_or_what(before, random=after, after=after, **options)
        drawn.append(figure.update_layout(width=width))
    page = page_of(drawn, tmp_path / "planes.html", opened)
    drawn_all = (
        "(n) => [...document.querySelectorAll('.js-plotly-plot')].filter(x => x.querySelector('.textpoint text'))"
    )
    page.page.wait_for_function(f"{drawn_all}.length === n", arg=len(PLANES))
    for case, (n_labels, n_large, *wrong) in zip(PLANES, page.page.evaluate(_LABELS), strict=True):
        assert wrong == [], case
        assert 3 <= n_labels <= 10, case
        assert n_large > 5, case
