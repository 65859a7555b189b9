"""The figures of the pages, in ``docs/figures``: ``python docs/studies figures [NAME ...]``, by default all of them.

Needs ``pip install kaleido`` and a Chromium or Chrome. ``drops`` trains five small models first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots
from shared.rows import TABLES
from shared.saving import save
from shared.texts import demo_texts

import tl_posdisent as tp


def heads() -> go.Figure:
    """The correlation of each head's scores with the additive fit, in the demo model."""
    return tp.plot_heads(tp.additivity(tp.load_demo_model(), tp.demo_tokens(length=512), progress=False), "r")


def smollm2_heads() -> go.Figure:
    """Held-out r of every head of SmolLM2-135M, as narrow as a column of a paper."""
    return tp.plot_heads(pd.read_csv(TABLES / "smollm2" / "heads.csv"), "r_held_out", title="SmolLM2-135M")


def smollm2_by_layer() -> go.Figure:
    """Held-out r of SmolLM2-135M by layer, as wide as a notebook."""
    table = pd.read_csv(TABLES / "smollm2" / "heads.csv")
    return tp.plot_heads(table, "r_held_out", by="layer", title="SmolLM2-135M: held-out r by layer")


def distance() -> go.Figure:
    """Distance components of eight heads of the demo model."""
    model = tp.load_demo_model()
    _, cache = model.run_with_cache(tp.demo_tokens(length=512))
    wavelengths = tp.read_model(model).specs(3)[0].rotary.wavelengths.tolist()
    return tp.plot_distance(tp.fit_additive(cache["attn_scores", 3]), wavelengths=wavelengths)


def shares() -> go.Figure:
    """Variance decomposition of the scores of the demo model at controlled distances."""
    table = tp.controlled_distance(tp.load_demo_model(), demo_texts(7, 450), sinks=50, progress=False)
    return tp.plot_shares(table)


def frequencies() -> go.Figure:
    """The share of the distance in the scores, by wavelength and head of the demo model."""
    table = tp.subspace_patterns(tp.load_demo_model(), demo_texts(7, 450), sinks=50, progress=False)
    return tp.viz.plot_subspaces(table, "distance")


def ablation() -> go.Figure:
    """The loss added by resampling each head of the demo model."""
    table = tp.head_ablation(tp.load_demo_model(), demo_texts(4, 128), mode="resample", progress=False)
    return tp.plot_heads(table, "effect", signed=True)


def patching() -> go.Figure:
    """How much of the loss each head of the demo model restores with its own positions."""
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    table = tp.position_patching(tp.load_demo_model(), tp.demo_tokens(length=128), order, progress=False)
    return tp.plot_heads(table, "effect", signed=True)


def perturbation() -> go.Figure:
    """The loss added by words that change places, by the fraction of words."""
    options = {"fractions": (0, 0.05, 0.1, 0.2, 0.35, 0.5), "seeds": 3, "unit": "word", "progress": False}
    return tp.viz.plot_perturbation(tp.perturbation_curve(tp.load_demo_model(), demo_texts(6, 500), **options))


def length() -> go.Figure:
    """Loss and largest score of the demo model by position, as it is and with two remedies."""
    model = tp.load_demo_model(n_ctx=1537)
    tokens, edges = tp.demo_tokens(length=1537), [64, *range(128, 1537, 128)]
    ways = {"as it is": None, "Λ-shaped window": tp.lambda_mask(model, 4, 256, 256)}
    ways["positions / 3"] = tp.position_interpolation(model, 3)
    tables = {
        name: tp.length_generalization(model, tokens, edges, hooks, progress=False) for name, hooks in ways.items()
    }
    return tp.viz.plot_length(tables, ["loss", "largest_score"], in_range=512)


def where_or_what() -> go.Figure:
    """The where–what plane of SmolLM2-135M, from the table that the study ``where_or_what`` writes."""
    width, height = FIGURES[where_or_what]
    heads = pd.read_csv(TABLES / "smollm2" / "where_or_what.csv")
    return tp.viz.plot_where_or_what(heads, width=width, height=height)


def how_much_text() -> go.Figure:
    """Error in units of the spread over heads, and rank correlation, against tokens, of every head of SmolLM2-135M."""
    scores, draws = (pd.read_csv(TABLES / "smollm2" / f"{name}.csv") for name in ("text_needed", "draws_needed"))
    table = pd.concat([scores, draws[draws["draws"] == 16]])
    table["error / standard deviation over heads"] = table["error"] / table["spread"]
    table["rank correlation of two sets"] = table["rank"]
    names = {"r": "r of one text", "r_held_out": "r, profile of other texts"}
    names |= {"mean output": "KL, mean output", "distance 5": "KL, every distance 5"}
    shown = (
        table[table["measure"].isin(names)]
        .replace({"measure": names})
        .melt(["tokens", "measure"], ["error / standard deviation over heads", "rank correlation of two sets"])
    )
    figure = px.line(shown, x="tokens", y="value", color="measure", facet_col="variable", markers=True, log_x=True)
    figure.for_each_annotation(lambda x: x.update(text=x.text.removeprefix("variable=")))
    return figure.update_yaxes(title="").update_xaxes(tickvals=[128, 256, 512, 1024])


def language_dynamics() -> go.Figure:
    """Two-axis r of each head of the demo model, in training."""
    table = pd.read_csv(TABLES / "language_dynamics.csv").query("step > 0")
    return px.line(table, x="step", y="r_two_axis", color="head", facet_col="layer", log_x=True)


def dynamics() -> go.Figure:
    """The gradient for a distance profile of each head, while a small model learns."""
    small = tp.synthetic.preset("small")
    model, task = small.model("rope", "distance"), small.tasks["distance"]
    models = {0: copy.deepcopy(model)}

    def keep(step: int, model: tp.synthetic.SyntheticModel) -> None:
        if step % 25 == 0:
            models[step] = copy.deepcopy(model)

    tp.synthetic.train(model, task, on_step=keep, progress=False)
    table = tp.synthetic.dynamics(models, task, progress=False)
    return px.line(table, x="step", y="norm_of_mean", color="head", facet_col="layer")


def drops() -> go.Figure:
    """The accuracy lost without each head, of small models with five encodings of position."""
    runs = tp.synthetic.train_preset(tp.synthetic.preset("small"), tasks=["distance"], progress=False)
    names = {"rope": "RoPE", "alibi": "ALiBi", "none": "none", "learned": "learned absolute", "mla": "MLA"}
    figure = make_subplots(rows=1, cols=len(names), subplot_titles=list(names.values()), shared_yaxes=True)
    for column, name in enumerate(names, start=1):
        run = runs[name, "distance", 0]
        split = run.split()
        table = tp.synthetic.head_drops(run.model, split.test_tokens[:1000], split.test_labels[:1000], progress=False)
        heads = tp.plot_heads(table.assign(drop=-table["effect"]), "drop", signed=True, limits=(-0.7, 0.7))
        trace = heads.data[0].update(showscale=column == len(names), colorbar_title="accuracy lost")
        figure.add_trace(trace, row=1, col=column)
    figure.update_yaxes(autorange="reversed").update_xaxes(title="head")
    return figure.update_yaxes(title="layer", row=1, col=1)


FIGURES: dict[Callable[[], go.Figure], tuple[int, int]] = {
    heads: (680, 360),
    smollm2_heads: (340, 620),
    smollm2_by_layer: (680, 300),
    distance: (720, 400),
    shares: (860, 400),
    frequencies: (860, 360),
    ablation: (680, 360),
    patching: (680, 360),
    perturbation: (680, 380),
    length: (720, 460),
    where_or_what: (760, 560),
    how_much_text: (900, 420),
    language_dynamics: (960, 360),
    dynamics: (860, 360),
    drops: (960, 280),
}
"""Each figure with its width and height."""


def main(*names: str) -> None:
    """Draw figures."""
    for draw, size in FIGURES.items():
        if not names or draw.__name__ in names:
            save(draw(), draw.__name__, *size)
