"""The sections of a report as HTML: what each shows, how to read it, what chance would be, its pictures and numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from .distance_sections import distance, shares, subspaces
from .head_widgets import ALONE, exhibits
from .markup import escape, folded, paragraph, signed, table
from .measurements import HEAD, PERTURBATIONS, SHARES, Found, SectionName, by_head
from .subject import Subject
from .summary import A, B
from .svg_charts import Line, legend, line_chart
from .svg_heatmaps import colour_bar, figure, heat_map

TITLES: dict[SectionName, str] = {
    "additivity": "How additive is each head?",
    "distance": "What heads make of the distance",
    "shares": "Whose variance are the scores?",
    "subspaces": "Which wavelengths do the work?",
    "heads": "The most and the least additive head",
    "perturbation": "Words and positions at the wrong place",
    "ablation": "Which heads are missed?",
}
_KINDS = {"order": "order of the text", "index": "position that RoPE is told", "feature": "phases of RoPE"}


def section(name: SectionName, subject: Subject, found: Found) -> str:
    """One section, or the reason for its absence."""
    if found.refused:
        content = paragraph(f"<strong>Not for this model.</strong> {escape(found.refused)}", "refused")
    else:
        content = _SECTIONS[name](subject, found)
        content += paragraph(escape(found.note), "refused") if found.note else ""
    return f'<section id="{name}"><h2>{TITLES[name]}</h2>{content}</section>\n'


def _additivity(subject: Subject, found: Found) -> str:
    trained = by_head(found.trained)
    random = None if found.random is None else by_head(found.random)
    said = paragraph(
        "The scores of each head in the text, fitted by a sum of a part of the distance, one of the query and one of "
        "the key. <em>r</em> is the correlation of the scores with that sum: 1 is a head whose scores are such a sum. "
        "Even noise fits a little, and untrained heads of late layers fit well, so read every number beside its value "
        "at random initialisation."
    )
    maps = [_r_map(trained, "r of this model")]
    by_layer = trained.groupby("layer")["r"].agg(["mean", "min", "max"]).reset_index()
    by_layer.columns = pd.Index(["layer", "mean r", "lowest", "highest"])
    if random is not None:
        maps.append(_r_map(random, "r at random initialisation"))
        by_layer["random"] = by_layer["layer"].map(random.groupby("layer")["r"].mean())
        trained = trained.merge(random[[*HEAD, "r"]], on=HEAD, suffixes=("", "_random"), how="left")
    columns = [*HEAD, "r", "r2_adjusted", *SHARES, *(["r_random"] if random is not None else [])]
    titles = {"r2_adjusted": "adjusted r²", "r_random": "random r"}
    titles |= ALONE
    every = table("heads-r", "Every head, mean over texts", trained[columns], titles, index=2)
    return (
        said
        + f'<div class="pair">{"".join(maps)}</div>'
        + table("layers-r", "r by layer: mean, lowest and highest of its heads", by_layer)
        + folded("The numbers of every head", every)
    )


def _r_map(table: pd.DataFrame, title: str) -> str:
    grid = table.pivot(index="layer", columns="head", values="r")
    drawn = heat_map(grid, label=f"Heat map: {title}, layers by heads", rows="layer", columns="head", low=0, high=1)
    return figure(drawn, f"{title} {colour_bar('0', '1')}")


def _perturbation(subject: Subject, found: Found) -> str:
    curve = found.trained
    kinds = [kind for kind in _KINDS if kind in set(curve["kind"])]
    lines: dict[str, Line] = {}
    for kind in kinds:
        rows = curve[curve["kind"] == kind]
        lines[_KINDS[kind]] = (rows["fraction"] * 100).tolist(), rows["added_loss"].tolist()
    ticks = sorted(set((curve["fraction"] * 100).tolist()))
    drawn = line_chart(
        lines,
        label="Lines: loss added against the share of tokens that change places",
        x_name="tokens that change places (%)",
        y_name="added loss (nats per token)",
        ticks=ticks,
        dots=True,
    )
    said = paragraph(
        "Pairs of neighbouring tokens change places: in the text, or only in the position that RoPE is told, or as "
        "disagreement among RoPE’s phases. <em>Added loss</em> is what this costs at places that did not move, in "
        f"nats per token; 0 would be a model that does not care. {A} reports that up to 5 % is tolerated. Look for a "
        "step behind it; where there is none, the cost grows in proportion. Perplexity is of all places; with the "
        "order of the text it counts next tokens that do not follow, too."
    )
    columns = ["kind", "fraction", "moved", "added_loss", "added_loss_se", "kl", "perplexity", "accuracy"]
    titles = {"moved": "tokens moved", "added_loss_se": "standard error", "kl": "KL", "fraction": "fraction asked for"}
    shown = table(
        "perturbation",
        f"Mean of {PERTURBATIONS} perturbations",
        curve[columns],
        titles,
        {"fraction": 2, "added_loss": 4, "added_loss_se": 4, "kl": 4, "perplexity": 1},
        index=2,
    )
    return said + figure(drawn + legend([_KINDS[kind] for kind in kinds], lines=True), "the cost of disorder") + shown


def _ablation(subject: Subject, found: Found) -> str:
    drops = found.trained
    grid = drops.pivot(index="layer", columns="head", values="effect")
    largest = float(np.nanmax(np.abs(grid.to_numpy()), initial=0.0)) or 1.0
    heat = heat_map(
        grid,
        label="Heat map: loss added without each head, layers by heads",
        rows="layer",
        columns="head",
        low=-largest,
        high=largest,
        diverging=True,
    )
    scale = colour_bar(signed(-largest, 2), signed(largest, 2), diverging=True)
    said = paragraph(
        "The output of one head at a time is set to zero. The number is the loss that this adds, in nats per token: "
        f"0 is a head that nobody misses here, below 0 one without which the model does better on this text. {B} "
        "reports one head of an early layer that carries nearly all positional work, in models trained on a task that "
        "needs positions; language models need many things at once. Chance would be that all heads matter alike."
    )
    worst = drops.sort_values("effect", ascending=False, kind="stable").head(8)[[*HEAD, "value", "effect"]]
    titles = {"value": "loss without it", "effect": "added loss"}
    baseline = drops["baseline"].iloc[0]
    every = table("heads-ablation", "Every head", drops[[*HEAD, "value", "effect"]], titles, 4, index=2)
    return (
        said
        + figure(heat, f"added loss without the head {scale}")
        + table("ablation", f"Missed most; the loss of the whole model is {baseline:.4f}", worst, titles, 4, index=2)
        + folded("The numbers of every head", every)
    )


_SECTIONS: dict[SectionName, Callable[[Subject, Found], str]] = {
    "additivity": _additivity,
    "distance": distance,
    "shares": shares,
    "subspaces": subspaces,
    "heads": exhibits,
    "perturbation": _perturbation,
    "ablation": _ablation,
}
