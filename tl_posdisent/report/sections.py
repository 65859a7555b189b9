"""The sections of a report as HTML: verdict, headline, explanations, random-weights baseline, figures and tables."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import pandas as pd
import torch

from tl_posdisent.experiments.attention_scores.trained_vs_random import above_random
from tl_posdisent.experiments.causal.attention_ladder import head_verdicts
from tl_posdisent.models.loading.random_init import described_copies
from tl_posdisent.report.atlas import label_words, looks_at
from tl_posdisent.report.markup import (
    MISSING,
    ROWS,
    definitions,
    escape,
    figure,
    folded,
    head_link,
    map_height,
    number,
    numbers,
    paragraph,
    plural,
    signed,
    table,
)
from tl_posdisent.report.measurements import (
    HEAD,
    IDLE,
    LADDER,
    PERTURBATIONS,
    SHARES,
    Copies,
    Exhibits,
    Found,
    SectionName,
    Subject,
    by_head,
)
from tl_posdisent.rope.variance_decomposition import COMPONENTS
from tl_posdisent.utils.validation import head_label
from tl_posdisent.viz.plots.bars import plot_shares, stacked_shares
from tl_posdisent.viz.plots.curves import plot_distance, plot_perturbation
from tl_posdisent.viz.plots.heatmaps import bounded_limits, plot_heads, plot_subspaces, plot_verdicts, wavelengths
from tl_posdisent.viz.widgets.offline import Widget
from tl_posdisent.viz.widgets.score_matrices import show_parts, show_patterns
from tl_posdisent.viz.widgets.token_colours import show_key_importance

A = '<a href="https://arxiv.org/abs/2503.13305">[A]</a>'
B = '<a href="https://arxiv.org/abs/2505.13027">[B]</a>'
_PAPERS = (
    f"<dt>{A}</dt><dd>Han and Ji, <cite>Computation Mechanism Behind LLM Position Generalization</cite>, ACL 2025</dd>"
    f"<dt>{B}</dt><dd>Gu et al., <cite>Deconstructing Positional Information: From Attention Logits to Training "
    "Biases</cite>, ICLR 2026</dd>"
)
_MATTERS = 0.01  # nats per token
_FEW = 0.05  # the share of tokens that [A] says may be out of place


def verdict(found: Mapping[SectionName, Found]) -> str:
    """The report in a few sentences, each computed from the data and linked to its section."""
    measured = {name: one for name, one in found.items() if not one.refused}
    longest = max((sum(one.read.lengths) for one in measured.values() if one.read), default=0)
    sentences = []
    for name, write in _VERDICTS.items():
        if name in measured:
            one = measured[name]
            only = [f"Only {one.sampled}."] if one.sampled else []
            if one.read and sum(one.read.lengths) < longest:
                only.append(f"Read: {one.read.sizes()}.")
            sentences += [" ".join([sentence, *only]) for sentence in write(one)]
    if not sentences:
        return ""
    items = "".join(f"<li>{sentence}</li>" for sentence in sentences)
    return f'<section id="verdict"><h2>Verdict</h2><ul>{items}</ul></section>\n'


def _additive_verdict(found: Found) -> list[str]:
    heads = by_head(found.trained).dropna(subset="r")
    if heads.empty:
        return ["No head has scores that vary in this text."]
    n = looks_at(heads).value_counts().reindex(["where", "what", "neither"], fill_value=0)
    look = "looks" if n["where"] == 1 else "look"
    first = (
        f"<strong>{n['where']} of {plural(len(heads), 'head')} {look} mainly at where a key is</strong>, "
        f"{n['what']} mainly at what it is, and {n['neither']} at neither alone "
        '(<a href="#additivity">additivity</a>): of the variance of their scores, the largest of three shares is '
        "the one that the distance explains alone, the one that the key explains alone, or the one that no sum of "
        "components explains."
    )
    top = heads.sort_values("share_distance", ascending=False, kind="stable").head(3)
    names = [f"{head_link(x['layer'], x['head'])} ({number(x['share_distance'], 2)})" for _, x in top.iterrows()]
    return [
        first,
        *_looks_of_random(found),
        f"Of {plural(len(heads), 'head')}, the distance alone explains the largest share in {', '.join(names)}.",
        *_against_random(found, *_told_apart(found.trained), "additivity"),
    ]


def _looks_of_random(found: Found) -> list[str]:
    """How many heads of the random copies the same rule calls *where* and *what*: the baseline of those counts."""
    if found.random is None or not set(SHARES) <= set(found.random):
        return []
    random = found.random.drop(columns="batch", errors="ignore").groupby(["seed", *HEAD], as_index=False).mean()
    n = looks_at(random.dropna(subset="r")).value_counts()
    where, what, neither = (int(n.get(kind, 0)) for kind in ("where", "what", "neither"))
    copies = _copies(found.random)
    return [
        f"By the same rule {where} of {plural(where + what + neither, 'head')} with random weights ({copies}) look at "
        f"where, {what} at what and {neither} at neither: only what differs from that has been learned."
    ]


def _copies(random: pd.DataFrame) -> str:
    n = random["seed"].nunique()
    return f"{n} random cop{'y' if n == 1 else 'ies'}"


def _told_apart(table: pd.DataFrame) -> tuple[str, str]:
    """The column of ``additivity`` that tells trained from random weights most clearly, and what it is of."""
    if "r_held_out" in table:
        return "r_held_out", "distance + query + key, with the distance component of the other texts,"
    return "r", "the three-axis fit"


def _against_random(found: Found, column: str, model: str, section: str) -> list[str]:
    """The mean beside that of random weights, and which heads are not above these."""
    if found.random is None or found.trained[column].isna().all():
        return []
    mean, chance = (_with_error(table, column) for table in (found.trained, found.random))
    n = found.trained["batch"].nunique() if "batch" in found.trained else 1
    return [
        f"<em>r</em> of {model} is {mean} on average, that of random weights {chance} ({plural(n, 'text')}, "
        f"{_copies(found.random)}; ± is a standard error over texts and copies, where there are several); "
        f'{above_random(found.trained, found.random, column)} (<a href="#{section}">{section}</a>).'
    ]


def _with_error(table: pd.DataFrame, column: str) -> str:
    """The mean over heads, texts and copies, ± its standard error over texts and copies if there are several."""
    mean, error = number(by_head(table)[column].mean(), 2), 0.0
    for draws in {"batch", "seed"}.intersection(table):
        means = table.groupby(draws)[column].mean()
        error += float(means.var() / len(means)) if len(means) > 1 else 0.0
    return f"{mean} ± {number(error**0.5, 2)}" if error else mean


def _perturbation_verdict(found: Found) -> list[str]:
    rows = found.trained[found.trained["fraction"] == _FEW]
    if rows.empty or not rows["moved"].any():
        return []
    what = {"order": "tokens of the text", "index": "positions", "feature": "phases of RoPE"}
    changes = []
    for _, row in rows.dropna(subset="added_loss").iterrows():
        error = "" if pd.isna(row["added_loss_se"]) else f" ± {number(row['added_loss_se'])}"
        changes.append(f"{what[row['kind']]} {signed(row['added_loss'])}{error}")
    return [
        f"With 5 % of neighbours exchanged the loss at the others changes by (nats per token, ± standard error over "
        f"{PERTURBATIONS} draws of the neighbours): {'; '.join(changes)} "
        '(<a href="#perturbation">perturbation</a>).'
    ]


def _ablation_verdict(found: Found) -> list[str]:
    drops = found.trained.dropna(subset="effect").sort_values("effect", ascending=False, kind="stable")
    most, worse = drops.iloc[0], int((drops["effect"] > _MATTERS).sum())
    where = '(<a href="#ablation">ablation</a>)'
    if not most["effect"] > 0:
        return [f"The loss is no higher without any single head {where}."]
    return [
        f"Without {head_label(int(most['layer']), int(most['head']))} the loss rises most, by "
        f"{number(most['effect'])} nats per token; without {worse} of {plural(len(drops), 'head')} it rises by more "
        f"than {_MATTERS} {where}."
    ]


def _ladder_verdict(found: Found) -> list[str]:
    verdicts = head_verdicts(found.trained)
    n = verdicts["verdict"].str.replace("^undecided .*", "undecided", regex=True).value_counts()
    effective = len(verdicts) - sum(int(n.get(kind, 0)) for kind in IDLE)
    sure = int((~head_verdicts(found.trained, correction="fdr")["verdict"].isin(IDLE)).sum())
    link = '(<a href="#ladder">ladder</a>)'
    if not effective:
        return [
            f"Of no single head do its mean output and uniform attention both cost more than noise in this text {link}."
        ]
    kinds = ("first token", "distance", "static", "additive", "banded", "query-dependent", "undecided")
    counted = ", ".join(f"{n[kind]} <em>{kind}</em>" for kind in kinds if kind in n)
    return [
        f"For {effective} of {plural(len(verdicts), 'head')} the loss is higher with the head’s mean output in its "
        "place, and with uniform attention there. By the simplest attention that recovers 95 % of what that costs, "
        f"these are: {counted} {link}.",
        f"These are {len(verdicts)} tests: of heads without use, {number(0.025 * len(verdicts), 1)} would be counted "
        f"by chance. With the false discovery rate held at 5 %, {sure} remain.",
    ]


def _labels_verdict(found: Found) -> list[str]:
    labels = label_words(found.trained)["label"]
    counts = labels.str.split(" + ", regex=False).explode().value_counts()
    counted = ", ".join(f"{n} <em>{label}</em>" for label, n in counts.items()) or "none"
    of = f"{labels.notna().sum()} of {plural(len(labels), 'head')}"
    return [f'Heads with a label by the keys that they attend to, {of}: {counted} (<a href="#labels">labels</a>).']


_VERDICTS: dict[SectionName, Callable[[Found], list[str]]] = {
    "additivity": _additive_verdict,
    "labels": _labels_verdict,
    "ladder": _ladder_verdict,
    "shares": lambda found: _against_random(found, "r_two_axis", "the two-axis model", "shares"),
    "perturbation": _perturbation_verdict,
    "ablation": _ablation_verdict,
}


def analysed(subject: Subject) -> str:
    model, spec, words = subject.model, subject.specs[0], subject.words
    rotary = [spec.layer for spec in subject.specs if spec.rotary is not None]
    nameless = words == [str(i) for i in subject.first[0].tolist()]  # a model without a tokenizer
    parameters = next(model.parameters(), torch.zeros(0, device="cpu"))
    dtype = str(parameters.dtype).removeprefix("torch.")
    turned = "all layers" if rotary == subject.layers else f"layers {numbers(rotary)}" if rotary else "none"
    cut = "" if sum(subject.lengths) == subject.given else f", of {subject.given} tokens given"
    rows = {
        "Model": f"{subject.name()} ({type(model).__name__}, {_millions(subject.n_parameters)} parameters, {dtype})",
        "Layers": f"{numbers(subject.layers)} of {plural(model.cfg.n_layers, 'layer')}",
        "Heads": f"{len(subject.pairs)}, of {spec.n_heads} a layer, {spec.d_head} coordinates, "
        f"{plural(spec.n_kv_heads, 'key head')}",
        "Attention": f"{'causal' if spec.causal else 'in both directions'}; rotary embeddings: {turned}",
        "Text": f"{subject.sizes()}{cut}",
        "It begins": (" " if nameless else "").join(words[:60]) + (" …" if len(words) > 60 else ""),
    }
    return f'<section id="analysed"><h2>What was analysed</h2>{definitions(rows)}</section>\n'


def headline(subject: Subject, found: Mapping[SectionName, Found]) -> str:
    """The correlations of this model beside those of the papers."""
    claims: dict[str, tuple[SectionName, str, str]] = {
        "r, two-axis model, at controlled distances": (
            "shares",
            "r_two_axis",
            f"0.959 {A}; random initialisation far lower",
        ),
        "r, three-axis model, at controlled distances": ("shares", "r_three_axis", MISSING),
        "r, three-axis fit of the text’s own scores": ("additivity", "r", MISSING),
        "r, the same with the distance component of the other texts": ("additivity", "r_held_out", MISSING),
    }
    rows = []
    for measure, (name, column, papers) in claims.items():
        one, random = found.get(name), MISSING
        if one is None or one.refused:
            here = "not asked for" if one is None else "not measured" if one.failed else "not for this model"
        elif column not in one.trained:
            here = "needs two texts"
        else:
            r = by_head(one.trained)[column]
            here = f"{number(r.mean())} ({number(r.min())} to {number(r.max())})" if len(r) > 1 else number(r.mean())
            here = here if r.notna().any() else "undefined: no head’s scores vary"
            random = MISSING if one.random is None else f"{number(one.random[column].mean())} ({_copies(one.random)})"
        rows.append({"measure": measure, "this model": here, "random": random, "the papers": papers})
    small = "Results for a small model may not transfer to a large one, or the other way round. "
    text = (
        f"This model has {_millions(subject.n_parameters)} parameters and read {sum(subject.lengths)} tokens. {A} "
        f"measured large language models, {B} six-layer models trained on two synthetic tasks: their figures are "
        f"given for comparison. {small if subject.n_parameters < 1e8 else ''}Correlations are means over heads. Only "
        "what exceeds the column “random” (the same architecture, untrained, on the same text; how its weights are "
        'drawn is under <a href="#reproduce">How to reproduce</a>) has been learned.'
    )
    body = table("headline", "The papers’ claims, and this model", pd.DataFrame(rows))
    return f'<section id="headline"><h2>Headline numbers</h2>{body}{paragraph(text)}</section>\n'


def _millions(n: int) -> str:
    return f"{n / 1e9:.1f} billion" if n >= 1e9 else f"{n / 1e6:.2f} million" if n >= 1e5 else str(n)


def reproduce(subject: Subject, call: str, seed: int, copies: Copies) -> str:
    """Versions, seed, command."""
    ids = torch.where(subject.real, subject.tokens, -1)  # padding counts as -1
    digest = hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()
    packages = ("tl_posdisent", "transformer_lens", "circuitsvis")
    versions = {name: version(name.replace("_", "-")) for name in packages}
    versions |= {"torch": torch.__version__, "Python": platform.python_version()}
    rows = {
        "Versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "Seed": f"seed {seed}",
        **({"Random": described_copies("random", [copies.std], copies.seeds(seed))} if copies.n else {}),
        "Token ids": f"SHA-256 {digest[:16]}…, int64, {subject.tokens.shape[0]} × {subject.tokens.shape[1]}",
    }
    return (
        '<section id="reproduce"><h2>How to reproduce</h2>'
        f'<pre tabindex="0"><code>{escape(call)}</code></pre>{definitions(rows, _PAPERS)}</section>\n'
    )


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
_BARS = 96  # heads with a bar each; of more, the means by layer
_KINDS = {"order": "order of the text", "index": "positions that RoPE receives", "feature": "phases of RoPE"}


def section(name: SectionName, subject: Subject, found: Found) -> tuple[str, list[str]]:
    """One section, or the reason for its absence; and the scripts of its widgets."""
    scripts: list[str] = []
    if found.refused:
        why = "Not measured." if found.failed else "Not for this model."
        content = paragraph(f"<strong>{why}</strong> {escape(found.refused)}", "refused")
    elif name == "heads":
        content, scripts = _exhibits(subject, found.trained)
    else:
        content = (_reads(subject, found.read) if found.read else "") + _SECTIONS[name](subject, found)
        content += paragraph(escape(found.note), "refused") if found.note else ""
    return f'<section id="{name}"><h2>{TITLES[name]}</h2>{content}</section>\n', scripts


def _reads(subject: Subject, read: Subject) -> str:
    """What was measured, of what the report reads."""
    of = "" if read.lengths == subject.lengths else f", of {subject.sizes()}"
    said = paragraph(f"Read: {read.sizes()}{of}. {read.sample}".strip(), "read")
    labels = ", ".join(head_label(*pair) for pair in read.pairs)
    return said + (folded("The heads measured", paragraph(labels)) if read.sampled else "")


def _grid(*figures: str) -> str:
    return f'<div class="grid">{"".join(figures)}</div>'


def _additivity(subject: Subject, found: Found) -> str:
    trained = by_head(found.trained)
    text = (
        "The scores of each head in the text are fitted by the three-axis model: a distance component plus a query "
        "component plus a key component. <em>r</em> is the correlation of the scores with the fit; 1 means that the "
        "scores are exactly such a sum. <em>Held-out r</em>, of two texts or more, is that with the distance component "
        "of the other texts. A <em>share</em> is a fraction of the variance of the scores. Random weights can give a "
        "high r too, so compare every number with its random-weights baseline. <em>r without the first "
        "token</em> is that of a fit that leaves the first key of each text out: an attention sink has scores unlike "
        "all others, and alone can make a head more or less additive."
    )
    by_layer = trained.groupby("layer")["r"].agg(["mean", "min", "max"]).reset_index()
    by_layer.columns = pd.Index(["layer", "mean r", "lowest", "highest"])
    by_layer["without the first token"] = by_layer["layer"].map(trained.groupby("layer")["r_without_first"].mean())
    height, (main, _) = map_height(len(by_layer)), _told_apart(trained)
    held_out, named = [main] if main != "r" else [], "r" if main == "r" else "held-out r"
    shown = pd.concat([trained, by_head(found.random)]) if found.random is not None else trained
    limits = bounded_limits(main, shown[main])  # the same colours in both maps
    drawn = plot_heads(trained, main, limits=limits)
    maps = [figure(drawn, f"{named} of this model", height=height, linked=len(trained) <= ROWS)]
    columns = [*HEAD, "r", *held_out, "r_without_first", "r2_adjusted", *SHARES]
    if found.random is not None:
        random = by_head(found.random)
        maps.append(figure(plot_heads(random, main, limits=limits), f"{named} at random initialisation", height=height))
        by_layer["random"] = by_layer["layer"].map(random.groupby("layer")["r"].mean())
        trained = trained.merge(random[[*HEAD, "r", *held_out]], on=HEAD, suffixes=("", "_random"), how="left")
        columns += ["r_random", *(f"{name}_random" for name in held_out)]
    for name, of in {"held-out": trained, "random held-out": found.random}.items():
        if held_out and of is not None:
            by_layer[name] = by_layer["layer"].map(of.groupby("layer")[main].mean())
    titles = {"r2_adjusted": "adjusted r²", "r_random": "random r", "r_without_first": "r without the first token"}
    titles |= {"r_held_out": "held-out r", "r_held_out_random": "random held-out r", **_ALONE}
    ranked = trained.sort_values("share_distance", ascending=False, kind="stable", na_position="last")
    listed = trained if len(trained) <= ROWS else ranked  # of many heads the most positional
    every = table("heads-r", "Every head, mean over texts", listed[columns], titles)
    return (
        paragraph(text)
        + _grid(*maps)
        + table("layers-r", "r by layer: mean, lowest and highest of its heads", by_layer)
        + folded("The numbers of every head", every)
    )


def _distance(subject: Subject, found: Found) -> str:
    profiles, layers = found.trained, found.trained["layer"].unique()
    text = (
        "The distance component of the scores, fitted to all texts together. A decreasing line is a head that prefers "
        "near keys; the scores of a head with a flat line do not depend on the distance alone. A score higher by "
        "0.69 doubles a key’s weight. Beyond 32, means of neighbouring distances are drawn; few pairs are far apart, "
        "so the right ends are noisy. In colour: the heads of a layer whose distance component varies most."
    )
    if len(layers) < len(subject.layers):
        text += f" Of {len(subject.layers)} layers, {len(layers)} are shown."
    figures = [
        figure(plot_distance(rows.drop(columns="layer")), f"Distance component of the heads of layer {layer}")
        for layer, rows in profiles.groupby("layer")
    ]
    return paragraph(text) + _grid(*figures)


def _shares(subject: Subject, found: Found) -> str:
    rows = found.trained
    text = (
        "At controlled distances every query meets every key at every distance, so that position and content are not "
        "confounded. A bar is the variance of one head’s scores: main effects of distance, query and key, and their "
        "interactions. The interactions with the distance, on top, are not additive. The two-axis <em>r</em> is that "
        "of a function of query and distance plus a function of query and key."
    )
    order = sorted(COMPONENTS, key=lambda effect: "distance:" in effect)
    means = rows.groupby("layer", as_index=False)[["r_two_axis", "r_three_axis", *order]].mean()
    few = len(rows) <= _BARS
    caption = "Share of the variance of the scores of each head" if few else "Share of the variance, mean over heads"
    drawn = plot_shares(rows if few else means)
    if found.random is not None:
        means.insert(2, "random r_two_axis", means["layer"].map(found.random.groupby("layer")["r_two_axis"].mean()))
    titles = {name: name.replace("_", " ").replace(":", " × ") for name in means.columns}
    columns = [*HEAD, "r_two_axis", "r_three_axis", *order]
    every = table("heads-shares", "Every head at controlled distances", rows[columns], titles)
    return (
        paragraph(text)
        + figure(drawn, caption, height=440)
        + table("layers-shares", "By layer, mean over heads", means, titles)
        + folded("The numbers of every head", every)
    )


def _subspaces(subject: Subject, found: Found) -> str:
    text = (
        "RoPE rotates each head’s coordinates in pairs (subspaces), from fast to slow. A subspace in which all keys "
        "have the same direction (<em>concentration</em> near 1) carries position but no content; one that hardly "
        "rotates over the text (<em>turn</em> near 0) carries content but no position. In other subspaces position "
        "and content interact."
    )
    components = ["distance", "semantic", "interaction"]
    columns = ["wavelength", "turn", "key_concentration", *components]
    means = found.trained.groupby("subspace", as_index=False)[columns].mean()
    if found.random is not None:
        chance = found.random.groupby("subspace")["key_concentration"].mean()
        means.insert(4, "random key_concentration", means["subspace"].map(chance))
    bars = stacked_shares(wavelengths(found.trained), means, components)
    bars.update_xaxes(title="wavelength (positions)", type="category")
    by_layer = found.trained.groupby(["layer", "subspace"], as_index=False)[["frequency", "key_concentration"]].mean()
    titles = {"key_concentration": "concentration of keys", "random key_concentration": "random concentration"}
    return (
        paragraph(text)
        + _grid(
            figure(bars, "Contribution to the variance of the scores, mean over heads", height=440),
            figure(plot_subspaces(by_layer), "Concentration of keys, mean over heads", height=440),
        )
        + table("subspaces", "By subspace, mean over heads and layers", means, titles, {"wavelength": 1})
    )


def _labels(subject: Subject, found: Found) -> str:
    text = (
        "The attention that a head gives, mean over queries, to the previous token, to the first token (often a sink), "
        "to the last keys (<em>local</em>: 8 with the query’s own), and, in random tokens that are repeated, to the "
        "same token in the first copy (<em>duplicate token</em>) and to the one after it (<em>induction</em>). A head "
        "has the label of what comes at least half of the way from random weights to 1; attention is not use. "
        "<em>Entropy</em> is that of the attention over keys, in nats."
    )
    every = label_words(found.trained).fillna({"label": MISSING})
    ranked = every.sort_values("label", key=lambda label: label == MISSING, kind="stable")  # those with a label first
    return paragraph(text) + folded("The numbers of every head", table("heads-labels", "Every head", ranked))


def _perturbation(subject: Subject, found: Found) -> str:
    curve = found.trained
    text = (
        "Pairs of neighbouring tokens are exchanged: in the text, or only in the positions that RoPE receives, or "
        "independently in each of RoPE’s subspaces. <em>Added loss</em> is measured at positions that did not move, in "
        f"nats per token; 0 means no effect. {A} reports that large models tolerate up to 5 %. Perplexity is over all "
        "positions; for the order of the text it also counts next tokens that moved."
    )
    drawn = plot_perturbation(curve.assign(kind=curve["kind"].map(_KINDS)))
    columns = ["kind", "fraction", "moved", "added_loss", "added_loss_se", "kl", "perplexity", "accuracy"]
    titles = {"moved": "tokens moved", "added_loss_se": "standard error", "kl": "KL", "fraction": "fraction asked for"}
    digits = {"fraction": 2, "added_loss": 4, "added_loss_se": 4, "kl": 4, "perplexity": 1}
    caption = "Added loss by perturbed fraction, ± one standard error over perturbations"
    return (
        paragraph(text)
        + figure(drawn, caption)
        + table("perturbation", f"Mean of {PERTURBATIONS} perturbations", curve[columns], titles, digits)
    )


def _ablation(subject: Subject, found: Found) -> str:
    drops = found.trained[[*HEAD, "value", "effect"]]
    text = (
        "The output of one head at a time is set to zero. The number is the added loss, in nats per token: 0 is a "
        f"head without effect on this text, below 0 one without which the loss is lower. {B} reports one head of an "
        "early layer that does nearly all of the positional work, in models trained on a task that needs positions; "
        "the added loss here includes all other effects of a head as well."
    )
    titles = {"value": "loss without it", "effect": "added loss"}
    caption = f"Largest added loss; the loss of the whole model is {found.trained['baseline'].iloc[0]:.4f}"
    worst = drops.sort_values("effect", ascending=False, kind="stable").head(8)
    every = "Every head measured" if found.sampled else "Every head"
    drawn = plot_heads(found.trained, "effect", signed=True)
    drawn.update_traces(colorbar_title_text="added loss<br>(nats per token)")
    return (
        paragraph(text)
        + figure(drawn, "Added loss without the head", height=map_height(drops["layer"].nunique()))
        + table("ablation", caption, worst, titles, 4)
        + folded(f"The numbers of {every.lower()}", table("heads-ablation", every, drops, titles, 4))
    )


def _ladder(subject: Subject, found: Found) -> str:
    rungs, verdicts = found.trained, head_verdicts(found.trained)
    held = "of other texts" if len(subject.tokens) > 1 else "of the same text, so they are not tested on another one"
    text = (
        "Another attention pattern in the place of one head’s at a time, fitted to the head’s own by least divergence, "
        "and the loss that it leaves. A head whose mean output does as well in its place is <em>not used</em> in this "
        "text. Uniform attention there costs the <em>gap</em>. The patterns are all attention to the first token "
        "(<em>first token</em>), and softmaxes of sums: of a profile of the distance (<em>distance</em>), and a number "
        "for the first token (<em>+ sink</em>), and a term linear in the key vector (<em>static</em>), these three "
        f"with coefficients {held}; of the distance and a free number for each key (<em>additive</em>), for each key "
        "and band of distances (<em>banded</em>). Free numbers see later queries, so those two are upper bounds. The "
        "<em>verdict</em> is the first of these that recovers 95 % of the gap: <em>first token</em>, <em>distance</em> "
        "(with or without the sink), <em>static</em>, <em>additive</em>, <em>banded</em>, or <em>query-dependent</em> "
        "(none). It is <em>undecided</em> between the first that may and the first that does, by 95 % intervals over "
        "texts (parts of long ones). A head whose gap is not significant has <em>no effect</em> in this text; it may "
        "have one in another."
    )
    height = map_height(verdicts["layer"].nunique())
    gaps = plot_heads(verdicts.assign(gap_se=verdicts["error"]), "gap", signed=True)
    gaps.update_traces(colorbar_title_text="gap<br>(nats per token)")
    content = paragraph(text)
    content += figure(plot_verdicts(verdicts, rungs=rungs), "Verdict by head, and the share recovered", height=height)
    content += figure(gaps, "Gap: added loss with uniform attention", height=height)
    shown = verdicts[~verdicts["verdict"].isin(IDLE)].sort_values("gap", ascending=False, kind="stable")
    if shown.empty:
        return content
    recovered = rungs.pivot(index=HEAD, columns="rung", values="recovered")[[*LADDER]].reset_index()
    listed = shown[[*HEAD, "verdict", "gap", "error"]].merge(recovered, on=HEAD, how="left")
    titles = {"gap": "gap (nats per token)", "error": "± standard error", "distance+sink": "distance + sink"}
    titles |= {"first_token": "first token"}
    caption = "Heads with an effect: the gap, and the share of it that each pattern recovers"
    return content + table("ladder", caption, listed, titles)


def _exhibits(subject: Subject, shown: Exhibits) -> tuple[str, list[str]]:
    """The HTML of the widgets, with what to look for; and their scripts."""
    n, scripts = min(_SHOWN, subject.lengths[0]), list[str]()

    def place(widget: Widget) -> str:
        element, script = widget.element_and_script(f"widget-{len(scripts)}")
        scripts.append(script)
        return f'<div class="widget">{element}</div>'

    content = paragraph(
        f"Scores of the first {n} tokens of the first text: rows are queries, columns keys, red is high, blue low. The "
        "distance component has stripes along the diagonal, the query component rows, the key component columns; "
        "fitted is their sum, and the residual is the difference between scores and fit."
    )
    both = {"Most additive": shown.most, "Least additive": shown.least}
    for title, (layer, head) in list(both.items())[: len(set(both.values()))]:
        fit, scores, label = shown.fits[layer], shown.scores[layer], head_label(layer, head)
        pattern = scores.double().masked_fill(~fit.mask.to(scores.device), -torch.inf).softmax(-1)
        components, patterns = f"{label}: the scores and their components", f"{label}: softmax of scores and fit"
        content += f"<h3>{title}: {label}</h3>" + paragraph(f"r = {float(fit.r[0, head]):.3f} in this text.")
        options: dict[str, Any] = {"positions": range(n)}
        content += place(show_parts(fit, subject.words, head, scores=scores, title=components, **options))
        content += paragraph("The softmax of these scores, and that of the fit alone.")
        content += place(show_patterns(fit, subject.words, pattern, heads=[head], title=patterns, **options))
    content += "<h3>Key component by token</h3>"
    content += paragraph("The key component of the scores of these layers, as the colours of the text.")
    fits = dict(sorted(shown.fits.items(), key=lambda one: one[0] != shown.most[0]))
    heads = sorted({head for layer in fits for head in subject.heads[layer]})
    positions = range(min(2 * _SHOWN, subject.lengths[0]))
    return content + place(show_key_importance(fits, subject.words, heads=heads, positions=positions)), scripts


_SECTIONS: dict[SectionName, Callable[[Subject, Found], str]] = {
    "additivity": _additivity,
    "distance": _distance,
    "shares": _shares,
    "subspaces": _subspaces,
    "labels": _labels,
    "perturbation": _perturbation,
    "ablation": _ablation,
    "ladder": _ladder,
}
