"""The figures and tables of each section of a report, as values for its template."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any

import pandas as pd
import torch
from markupsafe import Markup

from tl_posdisent.experiments.causal.head_verdicts import NEGLIGIBLE, head_verdicts
from tl_posdisent.page.atlas import label_words
from tl_posdisent.page.every_head import HEAD, IDLE, LADDER
from tl_posdisent.page.maps import head_map, with_attention
from tl_posdisent.page.markup import ROWS, figure, part, render, table
from tl_posdisent.page.measurements import (
    SHARES,
    Exhibits,
    Found,
    SectionName,
    by_head,
    profiled,
    told_apart,
)
from tl_posdisent.page.subject import PERTURBATIONS, Subject
from tl_posdisent.page.words import MISSING, NO_LABEL, exact_or_estimated, number, numbers
from tl_posdisent.rope.factorial_variance_decomposition import COMPONENTS
from tl_posdisent.utils.validation import head_label
from tl_posdisent.viz.plots.bars import plot_shares, stacked_shares
from tl_posdisent.viz.plots.curves import plot_distance, plot_perturbation
from tl_posdisent.viz.plots.heatmaps import bounded_limits, plot_heads, plot_subspaces, plot_verdicts, wavelengths
from tl_posdisent.viz.widgets.offline import Widget
from tl_posdisent.viz.widgets.score_matrices import show_parts, show_patterns
from tl_posdisent.viz.widgets.token_colours import show_key_importance

TITLES: dict[SectionName, str] = {
    "additivity": "Additivity of each head",
    "distance": "Distance profiles",
    "shares": "Variance decomposition of the scores",
    "subspaces": "Rotary subspaces",
    "labels": "Head labels",
    "heads": "The most and the least additive head",
    "perturbation": "Robustness to perturbed word order and positions",
    "ablation": "Head ablation",
    "ladder": "Attention ladder",
}
_SHOWN = 24  # tokens on the axes of a chart
_ALONE = {name: f"{name.removeprefix('share_')} alone" for name in SHARES}
_LISTED = 16  # longer tables of subspaces are folded
_BARS = 96  # the most heads with one bar each; beyond this, means by layer
_KINDS = {"order": "order of the text", "index": "positions that RoPE receives", "feature": "phases of RoPE"}


def section(name: SectionName, subject: Subject, found: Found) -> tuple[Markup, list[str]]:
    """Render one section, or the reason for its absence; return it with the scripts of its widgets."""
    scripts: list[str] = []
    content, read = Markup(), None if found.refused else found.read
    if name == "heads" and not found.refused:
        content, scripts = _exhibits(subject, found.trained)
    elif not found.refused:
        content = render(f"sections/{name}", **_SECTIONS[name](subject, found))
    reason = {"refused": found.refused, "failed": found.failed, "note": None if found.refused else found.note}
    run = ", ".join(head_label(*pair) for pair in found.run) if read else ""
    about = {"read": read and _reads(subject, read), "agreement": found.agreement if read else "", "run": run}
    return render("section", id=name, title=TITLES[name], content=content, **reason, **about), scripts


def _reads(subject: Subject, read: Subject) -> str:
    """State which of the report's texts the section measured."""
    of = "" if read.lengths == subject.lengths else f", of {subject.sizes()}"
    return f"Read: {read.sizes()}{of}."


def _additivity(subject: Subject, found: Found) -> dict[str, Any]:
    trained = by_head(found.trained)
    by_layer = trained.groupby("layer")["r"].agg(["mean", "min", "max"]).reset_index()
    by_layer.columns = pd.Index(["layer", "mean r", "lowest", "highest"])
    by_layer["without the first token"] = by_layer["layer"].map(trained.groupby("layer")["r_without_first"].mean())
    main = told_apart(trained)
    held_out, named = [main] if main != "r" else [], "r" if main == "r" else "held-out r"
    shown = pd.concat([trained, by_head(found.random)]) if found.random is not None else trained
    limits = bounded_limits(main, shown[main])  # the same colours in both maps
    drawn = plot_heads(trained, main, limits=limits)
    maps = [head_map(drawn, f"{named} of this model", subject, linked=len(trained) <= ROWS)]
    beside = ["r, foreign keys"] if "r, foreign keys" in trained else []
    columns = [*HEAD, *held_out, "r", *SHARES]
    if found.random is not None:
        random = by_head(found.random)
        maps.append(head_map(plot_heads(random, main, limits=limits), f"{named} at random initialisation", subject))
        by_layer["random"] = by_layer["layer"].map(random.groupby("layer")["r"].mean())
        trained = trained.merge(random[[*HEAD, "r", *held_out]], on=HEAD, suffixes=("", "_random"), how="left")
        columns += [*(f"{name}_random" for name in held_out), "r_random"]
    columns += [*beside, "r_without_first", "r2_adjusted"]
    for name in beside:
        by_layer[name] = by_layer["layer"].map(trained.groupby("layer")[name].mean())
    for name, of in {"held-out": trained, "random held-out": found.random}.items():
        if held_out and of is not None:
            by_layer[name] = by_layer["layer"].map(of.groupby("layer")[main].mean())
    titles = {"r2_adjusted": "adjusted r²", "r_random": "random r", "r_without_first": "r without the first token"}
    titles |= {"r_held_out": "held-out r", "r_held_out_random": "random held-out r", **_ALONE}
    ranked = trained.sort_values("share_distance", ascending=False, kind="stable", na_position="last")
    listed = trained if len(trained) <= ROWS else ranked  # if there are many heads, the most positional ones
    of_heads, of_layers = (with_attention(rows, subject.attention) for rows in (listed[columns], by_layer))
    every = table("heads-r", "Every head, mean over texts", of_heads, titles)
    layers = table("layers-r", "r by layer: mean, lowest and highest of its heads", of_layers)
    return {"maps": maps, "by_layer": layers, "every": every}


def _distance(subject: Subject, found: Found) -> dict[str, Any]:
    layers = profiled(subject.specs)
    figures = [
        figure(plot_distance(rows.drop(columns="layer")), f"Distance component of the heads of layer {layer}")
        for layer, rows in found.trained.groupby("layer")
        if layer in layers
    ]
    return {"figures": figures, "drawn": len(layers), "layers": len(subject.layers)}


def _shares(subject: Subject, found: Found) -> dict[str, Any]:
    rows = found.trained
    order = sorted(COMPONENTS, key=lambda effect: "distance:" in effect)
    means = rows.groupby("layer", as_index=False)[["r_two_axis", "r_three_axis", *order]].mean()
    few = len(rows) <= _BARS
    caption = "Share of the variance of the scores of each head" if few else "Share of the variance, mean over heads"
    drawn = plot_shares(rows if few else means)
    if found.random is not None:
        means.insert(2, "random r_two_axis", means["layer"].map(found.random.groupby("layer")["r_two_axis"].mean()))
    titles = {name: name.replace("_", " ").replace(":", " × ") for name in means.columns}
    columns = [*HEAD, "r_two_axis", "r_three_axis", *order]
    of_heads, of_layers = (with_attention(rows, subject.attention) for rows in (rows[columns], means))
    every = table("heads-shares", "Every head at controlled distances", of_heads, titles)
    layers = table("layers-shares", "By layer, mean over heads", of_layers, titles)
    return {"bars": figure(drawn, caption, height=440), "by_layer": layers, "every": every}


def _subspaces(subject: Subject, found: Found) -> dict[str, Any]:
    """Average over the layers of each rotary base: only they have the same wavelengths."""
    groups = layers_by_frequencies(subject)
    figures, tables = list[Markup](), list[Markup]()
    for n, (base, layers) in enumerate(groups.items()):
        of = f"layers {numbers(layers)} ({base})" if len(groups) > 1 else ""
        rows = found.trained[found.trained["layer"].isin(layers)]
        chance = None if found.random is None else found.random[found.random["layer"].isin(layers)]
        drawn, means = _by_wavelength(rows, chance, of)
        figures += drawn
        tables.append(_foldable("subspaces" if n == 0 else f"subspaces-{n + 1}", means, of))
    return {"figures": figures, "tables": tables, "bases": list(groups)}


def layers_by_frequencies(subject: Subject) -> dict[str, list[int]]:
    """Group the layers with rotary embeddings by their frequencies; the names are unique."""
    found: dict[tuple[float, ...], tuple[str, list[int]]] = {}
    for spec in subject.specs:
        if spec.rotary is None:
            continue
        waves = spec.rotary.wavelengths
        ends = f"wavelengths from {float(waves.min()):.4g} to {float(waves.max()):.6g}" if len(waves) else "no rotation"
        named = ends if isnan(spec.rotary.base) else f"base {spec.rotary.base:.6g}"
        found.setdefault(tuple(spec.rotary.frequencies.tolist()), (named, []))[1].append(spec.layer)
    names = [name for name, _ in found.values()]
    return {
        name if names.count(name) == 1 else f"{name}, from layer {layers[0]}": layers for name, layers in found.values()
    }


def _by_wavelength(rows: pd.DataFrame, chance: pd.DataFrame | None, of: str) -> tuple[list[Markup], pd.DataFrame]:
    """Draw and list means over heads of layers with the same frequencies."""
    components = ["distance", "semantic", "interaction"]
    means = rows.groupby("subspace", as_index=False)[["wavelength", "turn", *components, "key_concentration"]].mean()
    if chance is not None:
        at_random = chance.groupby("subspace")["key_concentration"].mean()
        means["random key_concentration"] = means["subspace"].map(at_random)
    bars = stacked_shares(wavelengths(rows), means, components)
    bars.update_xaxes(title="wavelength (positions)", type="category")
    by_layer = rows.groupby(["layer", "subspace"], as_index=False)[["frequency", "key_concentration"]].mean()
    where = f", {of}" if of else ""
    drawn = [
        figure(bars, f"Contribution to the variance of the scores, mean over heads{where}", height=440),
        figure(plot_subspaces(by_layer), f"Concentration of keys, mean over heads{where}", height=440),
    ]
    return drawn, means


def _foldable(name: str, means: pd.DataFrame, of: str) -> Markup:
    """Render the table of subspaces, folded if it is long."""
    titles = {"key_concentration": "concentration of keys", "random key_concentration": "random concentration"}
    caption = f"By subspace, mean over heads and {of or 'layers'}"
    content = table(name, caption, means, titles, {"wavelength": 1})
    return (
        part("folded", f"The {len(means)} subspaces{f' of {of}' if of else ''}", content)
        if len(means) > _LISTED
        else content
    )


def _labels(subject: Subject, found: Found) -> dict[str, Any]:
    every = label_words(found.trained).fillna({"label": NO_LABEL})
    ranked = every.sort_values("label", key=lambda label: label == NO_LABEL, kind="stable")  # those with a label first
    return {"every": table("heads-labels", "Every head", with_attention(ranked, subject.attention))}


def _perturbation(subject: Subject, found: Found) -> dict[str, Any]:
    curve = found.trained
    drawn = plot_perturbation(curve.assign(kind=curve["kind"].map(_KINDS)))
    columns = ["kind", "fraction", "moved", "added_loss", "added_loss_se", "kl", "perplexity", "accuracy"]
    titles = {"moved": "tokens moved", "added_loss_se": "standard error", "kl": "KL", "fraction": "fraction asked for"}
    digits = {"fraction": 2, "added_loss": 4, "added_loss_se": 4, "kl": 4, "perplexity": 1}
    caption = "Added loss by perturbed fraction, ± one standard error over perturbations"
    means = table("perturbation", f"Mean of {PERTURBATIONS} perturbations", curve[columns], titles, digits)
    return {"curves": figure(drawn, caption), "table": means}


def _ablation(subject: Subject, found: Found) -> dict[str, Any]:
    drops = found.trained[[*HEAD, "value", "effect", "exact"]]
    drops = drops.assign(exact=exact_or_estimated(drops["exact"]))
    titles = {"value": "loss without it", "effect": "added loss", "exact": "exact or estimated"}
    caption = f"Largest added loss; the loss of the whole model is {found.trained['baseline'].iloc[0]:.4f}"
    worst = drops.sort_values("effect", ascending=False, kind="stable").head(8)
    drawn = plot_heads(found.trained, "effect", signed=True)
    drawn.update_traces(colorbar_title_text="added loss<br>(nats per token)")
    worst, drops = (with_attention(rows, subject.attention) for rows in (worst, drops))
    return {
        "map": head_map(drawn, "Added loss without the head", subject),
        "largest": table("ablation", caption, worst, titles, 4),
        "every": table("heads-ablation", "Every head", drops, titles, 4),
        "estimated": bool(found.run),
    }


def _ladder(subject: Subject, found: Found) -> dict[str, Any]:
    rungs, verdicts = found.trained, head_verdicts(found.trained)
    gaps = plot_heads(verdicts.assign(gap_se=verdicts["error"]), "gap")
    gaps.update_traces(colorbar_title_text="divergence<br>(nats per token)")
    values = {
        "held_out": len((found.read or subject).tokens) > 1,
        "negligible": NEGLIGIBLE,
        "verdicts": head_map(plot_verdicts(verdicts, rungs=rungs), "Verdict by head, and the share recovered", subject),
        "gaps": head_map(gaps, "Gap: divergence of the predictions with uniform attention", subject),
        "table": "",
    }
    shown = verdicts[~verdicts["verdict"].isin(IDLE)].sort_values("gap", ascending=False, kind="stable")
    if shown.empty:
        return values
    recovered = rungs.pivot(index=HEAD, columns="rung", values="recovered_kl").reindex(columns=[*LADDER]).reset_index()
    listed = shown.replace({"between": {"": MISSING}}).merge(recovered, on=HEAD, how="left")
    rest = ["first_token", "error", "between"]
    listed = listed[[*HEAD, "verdict", "gap", *(rung for rung in LADDER if rung not in rest), *rest]]
    titles = {"gap": "gap (nats per token)", "error": "± standard error", "distance+sink": "distance + sink"}
    titles |= {"first_token": "first token", "between": "undecided between"}
    caption = "Heads with a possible effect: the gap, and the share of it that each pattern recovers"
    return values | {"table": table("ladder", caption, with_attention(listed, subject.attention), titles)}


def _exhibits(subject: Subject, shown: Exhibits) -> tuple[Markup, list[str]]:
    """Render the widgets with their explanations; return the HTML and the scripts."""
    n, scripts = min(_SHOWN, subject.lengths[0]), list[str]()

    def place(widget: Widget) -> Markup:
        element, script = widget.element_and_script(f"widget-{len(scripts)}")
        scripts.append(script)
        return Markup(element)

    both, heads = {"Most additive": shown.most, "Least additive": shown.least}, []
    for title, (layer, head) in list(both.items())[: len(set(both.values()))]:
        fit, scores, label = shown.fits[layer], shown.scores[layer], head_label(layer, head)
        pattern = scores.double().masked_fill(~fit.mask.to(scores.device), -torch.inf).softmax(-1)
        components, patterns = f"{label}: the scores and their components", f"{label}: softmax of scores and fit"
        options: dict[str, Any] = {"positions": range(n)}
        one = {"title": title, "label": label, "r": number(float(fit.r[0, head]))}
        one["parts"] = place(show_parts(fit, subject.words, head, scores=scores, title=components, **options))
        one["patterns"] = place(show_patterns(fit, subject.words, pattern, heads=[head], title=patterns, **options))
        heads.append(one)
    fits = dict(sorted(shown.fits.items(), key=lambda one: one[0] != shown.most[0]))
    some = sorted({head for layer in fits for head in subject.heads[layer]})
    positions = range(min(2 * _SHOWN, subject.lengths[0]))
    keys = place(show_key_importance(fits, subject.words, heads=some, positions=positions))
    return render("sections/heads", n=n, heads=heads, keys=keys), scripts


_SECTIONS: dict[SectionName, Callable[[Subject, Found], dict[str, Any]]] = {
    "additivity": _additivity,
    "distance": _distance,
    "shares": _shares,
    "subspaces": _subspaces,
    "labels": _labels,
    "perturbation": _perturbation,
    "ablation": _ablation,
    "ladder": _ladder,
}
