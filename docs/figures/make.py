"""Draw the figures of the documentation from the embedded demo model: ``python docs/figures/make.py [NAME …]``.

Needs ``pip install kaleido`` and a Chromium or Chrome. The files are committed: building the site needs neither.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import sum_of_parts
import text_needed
import torch
from plotly.subplots import make_subplots

import tl_posdisent as tp

FOLDER = Path(__file__).parent
MODEL = tp.load_demo_model()


def texts(n: int, length: int) -> torch.Tensor:
    """Cut from the demo text, each behind <|endoftext|>."""
    text = tp.demo_tokens(length=1 + n * (length - 1))[0, 1:]
    return torch.cat([torch.zeros(n, 1, dtype=torch.long), text.view(n, length - 1)], 1)


def ablation() -> go.Figure:
    return tp.plot_heads(tp.head_ablation(MODEL, texts(4, 128), mode="resample", progress=False), "effect", signed=True)


def substitution() -> go.Figure:
    return tp.viz.plot_substitution(tp.additive_substitution(MODEL, tp.demo_tokens(length=128), progress=False))


def frequencies() -> go.Figure:
    return tp.viz.plot_subspaces(tp.subspace_patterns(MODEL, texts(7, 450), sinks=50, progress=False), "distance")


def patching() -> go.Figure:
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    table = tp.position_patching(MODEL, tp.demo_tokens(length=128), order, progress=False)
    return tp.plot_heads(table, "effect", signed=True)


def perturbation() -> go.Figure:
    fractions = (0, 0.05, 0.1, 0.2, 0.35, 0.5)
    table = tp.perturbation_curve(MODEL, texts(6, 500), fractions=fractions, seeds=3, unit="word", progress=False)
    return tp.viz.plot_perturbation(table)


def length() -> go.Figure:
    tokens, edges = tp.demo_tokens(length=1537), [64, *range(128, 1537, 128)]
    ways = {"as it is": None, "Λ-shaped window": tp.lambda_mask(MODEL, 4, 256, 256)}
    ways["positions / 3"] = tp.position_interpolation(MODEL, 3)
    tables = {
        name: tp.length_generalization(MODEL, tokens, edges, hooks, in_range=512, progress=False)
        for name, hooks in ways.items()
    }
    return tp.viz.plot_length(tables, ["loss", "largest_score"], in_range=512)


def heads() -> go.Figure:
    return tp.plot_heads(tp.additivity(MODEL, tp.demo_tokens(length=512), progress=False), "r")


def distance() -> go.Figure:
    _, cache = MODEL.run_with_cache(tp.demo_tokens(length=512))
    wavelengths = tp.read_attention(MODEL, 3).rotary.wavelengths.tolist()
    return tp.plot_distance(tp.fit_additive(cache["attn_scores", 3]), wavelengths=wavelengths)


def shares() -> go.Figure:
    return tp.plot_shares(tp.controlled_distance(MODEL, texts(7, 450), sinks=50, progress=False))


def drops() -> go.Figure:
    """Draw the models of the preset ``small``, which are trained first if necessary."""
    runs = tp.synthetic.train_preset(
        tp.synthetic.preset("small"), tasks=["distance"], folder=Path("out/synthetic/trainings"), progress=False
    )
    names = {"rope": "RoPE", "alibi": "ALiBi", "none": "none", "learned": "learned absolute", "mla": "MLA"}
    figure = make_subplots(rows=1, cols=len(names), subplot_titles=list(names.values()), shared_yaxes=True)
    for column, name in enumerate(names, start=1):
        run = runs[name, "distance", 0]
        split = run.split()
        samples = split.test_tokens[:1000], split.test_labels[:1000]
        table = tp.synthetic.head_drops(run.model, *samples, progress=False)
        heads = tp.plot_heads(table.assign(drop=-table["effect"]), "drop", signed=True, limits=(-0.7, 0.7))
        trace = heads.data[0].update(showscale=column == len(names), colorbar_title="accuracy lost")
        figure.add_trace(trace, row=1, col=column)
    figure.update_yaxes(autorange="reversed").update_xaxes(title="head")
    return figure.update_yaxes(title="layer", row=1, col=1)


def dynamics() -> go.Figure:
    small = tp.synthetic.preset("small")
    model, task = small.model("rope", "distance"), small.tasks["distance"]
    models = {0: copy.deepcopy(model)}

    def keep(step: int, model: tp.synthetic.SyntheticModel) -> None:
        if step % 25 == 0:
            models[step] = copy.deepcopy(model)

    tp.synthetic.train(model, task, small.train_config("distance"), on_step=keep, progress=False)
    return tp.viz.plot_dynamics(tp.synthetic.dynamics(models, task, progress=False), "norm_of_mean")


def language_dynamics() -> go.Figure:
    table = pd.read_csv(FOLDER / "language_dynamics.csv")
    return tp.viz.plot_dynamics(table[table["step"] > 0], "r_two_axis").update_xaxes(type="log", dtick=1)


SEPARATION = [
    "r, one text",
    "r, profile of other texts",
    "controlled two_axis, one text",
    "attention explained, 2 texts",
]


BASELINES = {  # colour and name of each kind of copies
    ("random", "1/24"): ("#4477aa", "random, 1/24"),
    ("random", "0.02"): ("#777777", "random, 0.02"),
    ("random_qk", "1/24"): ("#228833", "random queries and keys"),
    ("shuffled", ""): ("#ccbb44", "shuffled"),
}


def trained_and_random() -> go.Figure:
    """Four statistics of SmolLM2-135M by layer: trained, and the range over five copies of four kinds."""
    table = pd.read_csv(FOLDER / "trained_and_random.csv", keep_default_na=False).query("texts == 'speeches'")
    figure = make_subplots(1, len(SEPARATION), shared_yaxes=True, subplot_titles=SEPARATION, horizontal_spacing=0.02)
    for column, name in enumerate(SEPARATION, 1):
        place: dict[str, Any] = {"row": 1, "col": column}
        for kind, (colour, label) in BASELINES.items():
            some = table[(table["weights"] == kind[0]) & (table["std"] == kind[1])].groupby("layer")[name]
            for edge, fill in (("min", None), ("max", "tonexty")):
                y = getattr(some, edge)()
                line = {"color": colour, "width": 1}
                shown = column == 1 and fill is not None
                figure.add_scatter(x=y.index, y=y, fill=fill, line=line, name=label, showlegend=shown, **place)
        y = table[table["weights"] == "trained"].set_index("layer")[name]
        line = {"color": "#b2182b", "width": 2}
        figure.add_scatter(x=y.index, y=y, line=line, name="trained", showlegend=column == 1, **place)
    figure.update_xaxes(title="layer").update_yaxes(range=[0, 1])
    title = "SmolLM2-135M: trained, and the range over five copies of each kind"
    return figure.update_layout(title=title, legend={"orientation": "h", "y": -0.25})


def smollm2_heads() -> go.Figure:
    """Draw a map as narrow as a column of a paper."""
    return tp.plot_heads(pd.read_csv(FOLDER / "smollm2" / "heads.csv"), "r_held_out", title="SmolLM2-135M")


def smollm2_by_layer() -> go.Figure:
    """Draw curves as wide as a notebook."""
    table = pd.read_csv(FOLDER / "smollm2" / "heads.csv")
    return tp.plot_heads(table, "r_held_out", by="layer", title="SmolLM2-135M: held-out r by layer")


def how_much_text() -> go.Figure:
    tables = (pd.read_csv(FOLDER / "smollm2" / f"{name}.csv") for name in ("text_needed", "draws_needed"))
    return text_needed.picture(*tables)


SIZES: dict[Callable[[], go.Figure], tuple[int, int]] = {
    ablation: (680, 360),
    substitution: (760, 560),
    frequencies: (860, 360),
    patching: (680, 360),
    perturbation: (680, 380),
    length: (720, 460),
    heads: (680, 360),
    distance: (720, 400),
    shares: (860, 400),
    drops: (960, 280),
    dynamics: (860, 360),
    language_dynamics: (960, 360),
    trained_and_random: (960, 330),
    smollm2_heads: (340, 620),
    smollm2_by_layer: (680, 300),
    how_much_text: (900, 420),
}


def save(figure: go.Figure, name: str, width: int, height: int, png: Path | None) -> None:
    """White, so that it reads in a light and in a dark theme. ``png`` is a folder for pictures to look at."""
    figure.update_layout(template="plotly_white", font={"size": 13}, margin={"l": 70, "r": 20, "t": 60, "b": 60})
    figure.update_yaxes(automargin=True).update_xaxes(automargin=True)
    for number, trace in enumerate(figure.data):
        trace.uid = f"{number:06d}"  # else drawn at random, and every run would write another file
    svg = figure.to_image("svg", width=width, height=height).decode()
    drawn = re.search(r'id="defs-([0-9a-f]+)"', svg)  # likewise
    if drawn:
        svg = svg.replace(drawn[1], name)
    (FOLDER / f"{name}.svg").write_text(svg + "\n", encoding="utf-8")
    if png:
        (png / f"{name}.png").write_bytes(figure.to_image("png", width=width, height=height, scale=1.5))


if __name__ == "__main__":
    options = [x for x in sys.argv[1:] if x.startswith("--png=")]
    wanted = [x for x in sys.argv[1:] if x not in options]
    if not wanted or "sum_of_parts" in wanted:
        (FOLDER / "sum_of_parts.svg").write_text(sum_of_parts.draw(tp.load_model("smollm2")), encoding="utf-8")
    for draw, (width, height) in SIZES.items():
        if not wanted or draw.__name__ in wanted:
            save(draw(), draw.__name__, width, height, Path(options[0][6:]) if options else None)
