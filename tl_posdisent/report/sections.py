"""The sections of a report as HTML: explanation, random-weights baseline, pictures and tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from tl_posdisent.experiments.causal.attention_ladder import head_verdicts
from tl_posdisent.viz.palette import VERDICTS, verdict_colour

from .distance_sections import distance, shares, subspaces
from .head_widgets import ALONE, exhibits
from .markup import ROWS, escape, folded, paragraph, signed, table
from .measurements import HEAD, LADDER, PERTURBATIONS, SHARES, Found, SectionName, by_head
from .subject import Subject
from .summary import A, B
from .svg_charts import Line, legend, line_chart
from .svg_heatmaps import category_map, colour_bar, figure, heat_map

TITLES: dict[SectionName, str] = {
    "additivity": "Additivity of each head",
    "distance": "Distance profiles",
    "shares": "Variance decomposition of the scores",
    "subspaces": "Rotary subspaces",
    "heads": "The most and the least additive head",
    "perturbation": "Robustness to perturbed word order and positions",
    "ablation": "Head ablation",
    "ladder": "Attention ladder",
}
_RANKED = 12  # heads in the table of the most positional
_KINDS = {"order": "order of the text", "index": "positions that RoPE receives", "feature": "phases of RoPE"}


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
        "The scores of each head in the text are fitted by the three-axis model: a distance part plus a query part "
        "plus a key part. <em>r</em> is the correlation of the scores with the fit; 1 means that the scores are "
        "exactly such a sum. A <em>share</em> is a fraction of the variance of the scores. Random weights can give a "
        "high r too, so compare every number with its random-weights baseline. <em>r without the first token</em> "
        "is that of a fit that leaves the first key of each text out: an attention sink has scores unlike all others, "
        "and alone can make a head more or less additive."
    )
    maps = [_r_map(trained, "r of this model", linked=len(trained) <= ROWS)]
    by_layer = trained.groupby("layer")["r"].agg(["mean", "min", "max"]).reset_index()
    by_layer.columns = pd.Index(["layer", "mean r", "lowest", "highest"])
    by_layer["without the first token"] = by_layer["layer"].map(trained.groupby("layer")["r_without_first"].mean())
    if random is not None:
        maps.append(_r_map(random, "r at random initialisation"))
        by_layer["random"] = by_layer["layer"].map(random.groupby("layer")["r"].mean())
        trained = trained.merge(random[[*HEAD, "r"]], on=HEAD, suffixes=("", "_random"), how="left")
    columns = [*HEAD, "r", "r_without_first", "r2_adjusted", *SHARES, *(["r_random"] if random is not None else [])]
    titles = {"r2_adjusted": "adjusted r²", "r_random": "random r", "r_without_first": "r without the first token"}
    titles |= ALONE
    ranked = trained.sort_values("share_distance", ascending=False, kind="stable", na_position="last")
    listed = trained if len(trained) <= ROWS else ranked  # of many heads those that are linked to
    every = table("heads-r", "Every head, mean over texts", listed[columns], titles, index=2, heads="named")
    ranked = ranked.dropna(subset="share_distance").head(_RANKED)
    first = [*HEAD, "share_distance", "share_key", *(c for c in columns if c == "r" or c == "r_random")]
    positional = table(
        "positional",
        f"Heads whose scores the distance explains best: the first {len(ranked)} of {len(trained)}",
        ranked[first],
        titles,
        index=2,
        heads="linked",
    )
    return (
        said
        + f'<div class="pair">{"".join(maps)}</div>'
        + positional
        + table("layers-r", "r by layer: mean, lowest and highest of its heads", by_layer)
        + folded("The numbers of every head", every)
    )


def _r_map(table: pd.DataFrame, title: str, *, linked: bool = False) -> str:
    grid = table.pivot(index="layer", columns="head", values="r")
    label = f"Heat map: {title}, layers by heads"
    drawn = heat_map(grid, label=label, rows="layer", columns="head", low=0, high=1, linked=linked)
    return figure(drawn, f"{title} {colour_bar('0', '1')}")


def _perturbation(subject: Subject, found: Found) -> str:
    curve = found.trained
    kinds = [kind for kind in _KINDS if kind in set(curve["kind"])]
    lines: dict[str, Line] = {}
    errors: dict[str, list[float]] = {}
    for kind in kinds:
        rows = curve[curve["kind"] == kind]
        lines[_KINDS[kind]] = (rows["fraction"] * 100).tolist(), rows["added_loss"].tolist()
        errors[_KINDS[kind]] = rows["added_loss_se"].tolist()
    ticks = sorted(set((curve["fraction"] * 100).tolist()))
    drawn = line_chart(
        lines,
        label="Lines: added loss against the fraction of exchanged tokens",
        x_name="exchanged tokens (%)",
        y_name="added loss (nats per token)",
        ticks=ticks,
        dots=True,
        errors=errors,
    )
    said = paragraph(
        "Pairs of neighbouring tokens are exchanged: in the text, or only in the positions that RoPE receives, or "
        "independently in each of RoPE’s subspaces. <em>Added loss</em> is measured at positions that did not move, in "
        f"nats per token; 0 means no effect. {A} reports that large models tolerate up to 5 %. Perplexity is over all "
        "positions; for the order of the text it also counts next tokens that moved."
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
    return (
        said
        + figure(
            drawn + legend([_KINDS[kind] for kind in kinds], lines=True),
            "added loss by perturbed fraction, ± one standard error over perturbations",
        )
        + shown
    )


def _ablation(subject: Subject, found: Found) -> str:
    drops = found.trained
    grid = drops.pivot(index="layer", columns="head", values="effect")
    largest = float(np.nanmax(np.abs(grid.to_numpy()), initial=0.0)) or 1.0
    heat = heat_map(
        grid,
        label="Heat map: added loss without each head, layers by heads",
        rows="layer",
        columns="head",
        low=-largest,
        high=largest,
        diverging=True,
    )
    scale = colour_bar(signed(-largest, 2), signed(largest, 2), diverging=True)
    said = paragraph(
        "The output of one head at a time is set to zero. The number is the added loss, in nats per token: 0 is a "
        f"head without effect on this text, below 0 one without which the loss is lower. {B} reports one head of an "
        "early layer that does nearly all of the positional work, in models trained on a task that needs positions; "
        "the added loss here includes all other effects of a head as well."
    )
    worst = drops.sort_values("effect", ascending=False, kind="stable").head(8)[[*HEAD, "value", "effect"]]
    titles = {"value": "loss without it", "effect": "added loss"}
    baseline = drops["baseline"].iloc[0]
    every = table("heads-ablation", "Every head", drops[[*HEAD, "value", "effect"]], titles, 4, index=2)
    return (
        said
        + figure(heat, f"added loss without the head {scale}")
        + table(
            "ablation", f"Largest added loss; the loss of the whole model is {baseline:.4f}", worst, titles, 4, index=2
        )
        + folded("The numbers of every head", every)
    )


def _ladder(subject: Subject, found: Found) -> str:
    rungs, verdicts = found.trained, head_verdicts(found.trained)
    held = "of other texts" if len(subject.tokens) > 1 else "of the same text, so they are not tested on another one"
    said = paragraph(
        "Another attention pattern in the place of one head’s at a time, fitted to the head’s own by least divergence, "
        "and the loss that it leaves. Uniform attention there costs the <em>gap</em>. The patterns are softmaxes of "
        "sums: of a profile of the distance (<em>distance</em>), and a number for the first token (<em>+ sink</em>), "
        f"and a term linear in the key vector (<em>static</em>), these three with coefficients {held}; of the distance "
        "and a free number for each key (<em>additive</em>), for each key and band of distances (<em>banded</em>). "
        "Free numbers see later queries, so those two are upper bounds. The <em>verdict</em> is the first of these "
        "that recovers 95 % of the gap: <em>positional</em> (distance), <em>static</em> (distance and key), "
        "<em>banded</em>, or <em>query-dependent</em> (none). A head whose gap is below two standard errors has <em>no "
        "effect</em> in this text; it may have one in another."
    )
    grid = verdicts.pivot(index="layer", columns="head", values="verdict")
    drawn = category_map(
        grid, verdict_colour, label="Map: the verdict of each head, layers by heads", rows="layer", columns="head"
    )
    shown = verdicts[verdicts["verdict"] != "no effect"].sort_values("gap", ascending=False, kind="stable")
    columns = [*HEAD, "verdict", "gap", "error"]
    if shown.empty:
        return said + figure(drawn, "verdict by head")
    shares = rungs.pivot(index=HEAD, columns="rung", values="recovered")[[*LADDER]].reset_index()
    listed = shown[columns].merge(shares, on=HEAD, how="left")
    listed = listed.astype({"layer": int, "head": int})
    titles = {"gap": "gap (nats per token)", "error": "± standard error", "distance+sink": "distance + sink"}
    heading = "Heads with an effect: the gap, and the share of it that each pattern recovers"
    key = legend([*VERDICTS], lines=False)
    return said + figure(drawn + key, "verdict by head") + table("ladder", heading, listed, titles, index=2)


_SECTIONS: dict[SectionName, Callable[[Subject, Found], str]] = {
    "additivity": _additivity,
    "distance": distance,
    "shares": shares,
    "subspaces": subspaces,
    "heads": exhibits,
    "perturbation": _perturbation,
    "ablation": _ablation,
    "ladder": _ladder,
}
