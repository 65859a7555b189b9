"""The picture of the landing page: the scores of one head as a sum of maps. Plain strokes, no embedded bitmap.

Code hosts show SVG files under rules that may forbid images inside them, so every cell is drawn.
"""

from __future__ import annotations

from typing import Any

import torch
from plotly.colors import sample_colorscale
from shared.saving import FIGURES
from torch import Tensor

import tl_posdisent as tp

LENGTH, SIDE, GAP, LEVELS = 56, 168, 36, 21  # tokens; size and distance of the maps; colours
TOP, LEFT, WIDTH, HEIGHT = 44, 10, 1004, 256
MEANING = {
    "scores": "one head",
    "distance": "how far",
    "query": "who looks",
    "key": "what is there",
    "residual": "all else",
}
# Of the ground and the two kinds of words, in a light and in a dark theme.
COLOURS = (
    "<style>rect{fill:#fff}.major{fill:#222}.minor{fill:#555}"
    "@media (prefers-color-scheme: dark){rect{fill:#161b22}.major{fill:#e6edf3}.minor{fill:#a9b3be}}</style>"
)


def draw(model: Any) -> str:
    """The SVG file, for head L16H0 of SmolLM2-135M on the first words of the demo text, but for their first key."""
    _, cache = model.run_with_cache(model.to_tokens(tp.demo_text(), truncate=False)[:, :LENGTH])
    scores = cache["attn_scores", 16][0, 0].double()
    fit = tp.fit_additive(scores, sinks=1)
    maps = {name: fit.component(name) for name in ("distance", "query", "key")}
    maps = {"scores": scores - fit.intercept, **maps, "residual": fit.residual(scores)}
    limit = maps["scores"][fit.mask].abs().quantile(0.98)
    parts = [text(LEFT + SIDE + GAP / 2 + n * (SIDE + GAP), 138, sign, 34) for n, sign in enumerate("=+++")]
    for n, (name, values) in enumerate(maps.items()):
        x = LEFT + n * (SIDE + GAP)
        parts.append(text(x + SIDE / 2, 30, name, 25, weight="bold"))
        parts.append(text(x + SIDE / 2, TOP + SIDE + 28, MEANING[name], 21, "minor"))
        level = ((values / limit).clamp(-1, 1) + 1) / 2 * (LEVELS - 1)
        drawn = strokes(level.round().long().where(fit.mask, -1))
        parts.append(f'<g transform="translate({x},{TOP}) scale({SIDE / LENGTH:.3f})">{drawn}</g>')
    about = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    style = 'shape-rendering="crispEdges" font-family="\'Open Sans\', verdana, arial, sans-serif" text-anchor="middle"'
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {about} {style}>', COLOURS, ground, *parts, "</svg>\n"])


def text(x: float, y: float, words: str, size: int, kind: str = "major", weight: str = "normal") -> str:
    return f'<text x="{x:g}" y="{y}" font-size="{size}" font-weight="{weight}" class="{kind}">{words}</text>'


def strokes(levels: Tensor) -> str:
    """Each colour as one path of horizontal runs, or of vertical ones if these are fewer; -1 is left out."""
    across, down = runs(levels), runs(levels.T)
    upright = sum(map(len, down)) < sum(map(len, across))
    colours = sample_colorscale("RdBu_r", LEVELS)
    paths = []
    for shade, level_runs in zip(colours, down if upright else across, strict=True):
        form = "M{0}.5 {1}v{2}" if upright else "M{1} {0}.5h{2}"
        d = "".join(form.format(*run) for run in level_runs)
        paths.append(f'<path stroke="{shade}" d="{d}"/>' if level_runs else "")
    return "".join(paths)


def runs(levels: Tensor) -> list[list[tuple[int, int, int]]]:
    """For each level (line, start, length) of its runs."""
    level_runs: list[list[tuple[int, int, int]]] = [[] for _ in range(LEVELS)]
    for line, row in enumerate(levels):
        values, lengths = torch.unique_consecutive(row, return_counts=True)
        start = 0
        for value, length in zip(values.tolist(), lengths.tolist(), strict=True):
            if value >= 0:
                level_runs[value].append((line, start, length))
            start += length
    return level_runs


def main() -> None:
    """Write ``docs/figures/sum_of_parts.svg``."""
    (FIGURES / "sum_of_parts.svg").write_text(draw(tp.load_model("smollm2")), encoding="utf-8")
