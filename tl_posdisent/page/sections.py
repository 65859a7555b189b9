"""The sections of the report: each calls one public function, and shows its table by a public plot."""

from __future__ import annotations

from typing import Final, Literal, get_args

import pandas as pd
from torch import Tensor

from tl_posdisent.additive.fit import fit_additive
from tl_posdisent.experiments.attention_scores.additivity import additivity
from tl_posdisent.experiments.attention_scores.controlled_distance import controlled_distance
from tl_posdisent.experiments.attention_scores.head_labels import (
    N_SEQUENCES,
    label_measures,
    labelled,
    repeated_tokens,
)
from tl_posdisent.experiments.causal.head_ablation import head_ablation
from tl_posdisent.experiments.measuring.random_copies import above_random
from tl_posdisent.experiments.robustness.perturb import Kind
from tl_posdisent.experiments.robustness.perturbation_curve import lower_and_higher, perturbation_curve
from tl_posdisent.experiments.where_what.head_table import row_names
from tl_posdisent.models.capture import for_each_scores, of_heads
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.texts import read_texts
from tl_posdisent.page.names import SectionName
from tl_posdisent.page.section import Section, Settings, Shown, by_head
from tl_posdisent.page.subject import Subject
from tl_posdisent.page.where_or_what import WHERE_OR_WHAT
from tl_posdisent.page.words import NO_LABEL, counted, label_words, number, signed
from tl_posdisent.rope.factorial_variance_decomposition import COMPONENTS
from tl_posdisent.utils.statistics import error_over_draws
from tl_posdisent.utils.tables import HEAD, number_heads
from tl_posdisent.utils.validation import head_label
from tl_posdisent.utils.words import plural
from tl_posdisent.viz.plots.bars import plot_shares
from tl_posdisent.viz.plots.curves import plot_distance, plot_perturbation
from tl_posdisent.viz.plots.heatmaps import plot_heads

# --- additivity ---------------------------------------------------------------------------------------------------


def main_correlation(table: pd.DataFrame) -> Literal["r_held_out", "r"]:
    """Return the column that best separates trained from random weights; of a single text there is only ``r``."""
    return "r_held_out" if "r_held_out" in table else "r"


def _measure_additivity(subject: Subject, settings: Settings) -> pd.DataFrame:
    return additivity(subject.reading, subject.tokens, heads=subject.pairs, progress=False)


def _show_additivity(trained: pd.DataFrame, random: pd.DataFrame | None) -> Shown:
    heads, main = by_head(trained), main_correlation(trained)
    if heads["r"].isna().all():
        return Shown(["No head has scores that vary in these texts."])
    columns = [main, "share_distance", "share_key", *(["r"] if main != "r" else [])]
    titles = {"r_held_out": "held-out r", "share_distance": "distance alone", "share_key": "key alone"}
    titles |= {f"random {name}": f"random {title}" for name, title in titles.items()}
    model = "the three-axis fit with the distance component of the other texts" if main != "r" else "the three-axis fit"
    drawn = plot_heads(heads, main).update_layout(meta="linked")
    return Shown(
        [_mean_shares(heads, random), *_beside_random(trained, random, main, model)],
        [(drawn, f"{titles.get(main, main)}, by layer and head")],
        (_by_layer(heads, random, columns), "By layer, mean over heads and texts"),
        titles,
    )


def _mean_shares(heads: pd.DataFrame, random: pd.DataFrame | None) -> str:
    """State the shares of distance and key, beside those of random weights."""
    names = ("share_distance", "share_key")
    distance, key = (f"{100 * heads[name].mean():.0f} %" for name in names)
    sentence = f"Of the variance of a head’s scores, the distance alone explains {distance} and the key alone {key}"
    if random is None:
        return f"{sentence} on average."
    distance, key = (f"{100 * random[name].mean():.0f} %" for name in names)
    return f"{sentence} on average; with random weights {distance} and {key}."


def _by_layer(heads: pd.DataFrame, random: pd.DataFrame | None, columns: list[str]) -> pd.DataFrame:
    """Average columns over the heads of each layer, each beside that of random weights."""
    means = heads.groupby("layer", as_index=False)[columns].mean()
    if random is not None:
        for name in columns:
            means.insert(
                list(means).index(name) + 1, f"random {name}", means["layer"].map(random.groupby("layer")[name].mean())
            )
    return means


def _beside_random(trained: pd.DataFrame, random: pd.DataFrame | None, column: str, model: str) -> list[str]:
    """Compare a mean correlation with that of random weights; no sentence without them.

    Args:
        column: the correlation.
        model: what has this correlation with the scores, in words.
    """
    if random is None or trained[column].isna().all():
        return []
    n_texts = trained["batch"].nunique() if "batch" in trained else 1
    n_copies = random["seed"].nunique()
    several = [name for name, n in (("texts", n_texts), ("copies", n_copies)) if n > 1]
    of_texts = f"{plural(n_texts, 'text')}, " if "batch" in trained else ""
    error = f"; ± is a standard error over {' and '.join(several)}" if several else ""
    draws = f"{of_texts}{plural(n_copies, 'random copy', 'random copies')}{error}"
    here, at_random = (_mean_with_error(table, column) for table in (trained, random))
    above = above_random(trained, random, column)
    return [f"r of {model} is {here} on average, that of random weights {at_random} ({draws}); {above}."]


def _mean_with_error(table: pd.DataFrame, column: str) -> str:
    """Format the mean over heads, texts and copies, ± its standard error if there are several texts or copies."""
    mean, error = by_head(table)[column].mean(), error_over_draws(table, column, ["batch", "seed"])
    digits = 3 if 0 < error < 0.01 else 2  # an error of 0.00 would say nothing
    return number(mean, digits) + (f" ± {number(error, digits)}" if error else "")


ADDITIVITY = Section(
    "What the scores look like",
    """
The scores of each head in the text are fitted by the three-axis model: a distance component plus a query component
plus a key component. r is the correlation of the scores with the fit; 1 means that the scores are exactly such a sum.
With two texts or more, held-out r is that with the distance component of the other texts. A share is a fraction of
the variance of the scores. Random weights can give a high r too, so compare every number with its random-weights
baseline.
    """,
    _measure_additivity,
    _show_additivity,
    measure_copy=_measure_additivity,
    closed=True,
)

# --- distance profiles --------------------------------------------------------------------------------------------

_LINES = 64
"""Maximum number of heads whose distance profiles are drawn."""


def _measure_distance(subject: Subject, settings: Settings) -> pd.DataFrame:
    """Fit each head's distance component to all texts together."""
    tables: list[pd.DataFrame] = []

    def fit_layer(spec: AttentionSpec, scores: Tensor) -> None:
        heads = sorted(subject.heads[spec.layer])
        mask: Literal["causal", "full"] = "causal" if spec.causal else "full"
        fit = fit_additive(of_heads(scores, heads), pool=True, mask=mask, window=spec.window)
        tables.append(number_heads(fit.to_frame("distance"), heads).assign(layer=spec.layer))

    for_each_scores(subject.model, subject.tokens, subject.specs, fit_layer)
    table = pd.concat(tables, ignore_index=True)[[*HEAD, "distance", "value"]]
    return table.assign(cells=subject.tokens.shape[1] - table["distance"].abs())


def _show_distance(trained: pd.DataFrame, random: pd.DataFrame | None) -> Shown:
    spread = trained.groupby(HEAD)["value"].std()
    drawn = trained.set_index(HEAD).loc[spread.nlargest(_LINES).index.sort_values()].reset_index()
    caption = "Distance component of the scores of each head"
    if len(spread) > _LINES:
        caption = f"Distance component of the scores of the {_LINES} of {len(spread)} heads whose profile varies most"
    return Shown(_most_varied(spread), [(plot_distance(drawn).update_layout(height=480), caption)])


def _most_varied(spread: pd.Series) -> list[str]:
    """Name the heads whose distance component varies most; no sentence for a single distance."""
    largest = spread.dropna().nlargest(3).reset_index()
    if largest.empty:
        return []
    named = [f"{name} ({number(x, 2)})" for name, x in zip(row_names(largest), largest["value"], strict=True)]
    return [
        f"The distance component varies most in {', '.join(named)}: standard deviations over distances, in units of "
        f"the scores; the median of {plural(len(spread), 'head')} is {number(spread.median(), 2)}."
    ]


DISTANCE = Section(
    "Distance profiles",
    """
The distance component of the scores, fitted to all texts together. A head with a decreasing line prefers near keys;
the scores of a head with a flat line do not depend on the distance alone. A score higher by 0.69 doubles a key’s
weight. Beyond 32, means of neighbouring distances are drawn; few pairs are far apart, so the right ends are noisy.
The heads whose component varies most are coloured.
    """,
    _measure_distance,
    _show_distance,
    closed=True,
)

# --- variance decomposition ---------------------------------------------------------------------------------------

_BARS = 96
"""Maximum number of heads with a bar each; of more heads, means by layer are drawn."""


def _measure_shares(subject: Subject, settings: Settings) -> pd.DataFrame:
    return controlled_distance(subject.reading, subject.tokens, heads=subject.pairs, progress=False)


def _show_shares(trained: pd.DataFrame, random: pd.DataFrame | None) -> Shown:
    few = len(trained) <= _BARS
    caption = "Share of the variance of the scores" + (" of each head" if few else ", mean over the heads of a layer")
    means = _by_layer(trained, random, ["r_two_axis", "r_three_axis"])
    shares = trained.groupby("layer", as_index=False)[list(COMPONENTS)].mean()
    titles = {name: name.replace("_", " ").replace(":", " × ") for name in (*means, *shares)}
    return Shown(
        _beside_random(trained, random, "r_two_axis", "the two-axis model"),
        [(plot_shares(trained if few else shares).update_layout(height=440), caption)],
        (means.merge(shares, on="layer"), "By layer, mean over heads"),
        titles,
    )


SHARES = Section(
    "Variance decomposition of the scores",
    """
At controlled distances every query is combined with every key at every distance, so that position and content are not
confounded. A bar is the variance of one head’s scores: main effects of distance, query and key, and their
interactions. The three-axis r is that of a function of distance plus one of query plus one of key, a sum without
interactions. The two-axis r is that of a function of query and distance plus a function of query and key: it also has
the interactions distance × query and query × key. The two on top, distance × key and distance × query × key, are in
neither sum. [A] reports an r of 0.959 for large language models.
    """,
    _measure_shares,
    _show_shares,
    measure_copy=_measure_shares,
)

# --- head labels --------------------------------------------------------------------------------------------------


def _measure_labels(subject: Subject, settings: Settings) -> pd.DataFrame:
    """Measure that by which ``head_labels`` labels heads, of the model or of a copy."""
    copied = repeated_tokens(subject.model, None, N_SEQUENCES, settings.seed)
    return label_measures(subject.reading, read_texts(subject.model, subject.tokens), copied, subject.pairs)


def _show_labels(trained: pd.DataFrame, random: pd.DataFrame | None) -> Shown:
    rows = trained.assign(label=label_words(trained["label"]))
    labels = rows["label"][rows["label"] != NO_LABEL]
    counts = labels.str.split(" + ", regex=False).explode().value_counts()
    several = "; a head can have several" if counts.sum() > len(labels) else ""
    heads, by = plural(len(rows), "head"), "by the keys that they attend to"
    sentence = f"{len(labels)} of {heads} have a label, {by}: {counted(counts.to_dict())}{several}."
    rows = rows.sort_values("label", key=lambda label: label == NO_LABEL, kind="stable")
    return Shown(
        [sentence if len(labels) else f"None of {heads} has a label, {by}."],
        table=(rows, "Attention of each head, those with a label first"),
    )


LABELS = Section(
    "Head labels",
    """
The table shows a head’s attention, as a mean over queries, to the previous token, to the first token (often a sink),
and to the last keys (local: 8 with the query’s own). In repeated random tokens it also shows the attention to the
same token in the first copy (duplicate token) and to the token after it (induction). A head gets the label of each
measure that is at least half of the way from its value with random weights to 1. Attention does not show use. Entropy
is that of the attention over keys, in nats.
    """,
    _measure_labels,
    _show_labels,
    measure_copy=_measure_labels,
    beside_copies=labelled,
    positions=512,
    tokens=1024,
    closed=True,
)

# --- perturbation -------------------------------------------------------------------------------------------------

FRACTIONS, DRAWS = (0, 0.05, 0.2, 0.5), 2
"""Fractions of each text that are perturbed, each so many times: twice, so both draws are shown, and no interval."""
_TOLERATED = 0.05
"""The fraction of tokens that may be out of place according to [A]."""
_EXCHANGED = {"order": "tokens of the text", "index": "positions", "feature": "phases of RoPE"}


def _measure_perturbation(subject: Subject, settings: Settings) -> pd.DataFrame:
    """Perturb order, positions and phases; of a model without RoPE, the order of the text only."""
    rotary = all(spec.rotary is not None for spec in subject.reading.specs())
    kinds: tuple[Kind, ...] = get_args(Kind) if rotary else ("order",)
    seeds = range(settings.seed, settings.seed + DRAWS)
    return perturbation_curve(
        subject.reading, subject.tokens, kinds=kinds, fractions=FRACTIONS, seeds=seeds, progress=False
    )


def _show_perturbation(trained: pd.DataFrame, random: pd.DataFrame | None) -> Shown:
    lower, higher = lower_and_higher(trained)
    rows = trained.assign(kind=trained["kind"].map(_EXCHANGED), lower=lower, higher=higher)
    columns = ["kind", "fraction", "moved", "added_loss", "lower", "higher", "kl", "perplexity", "accuracy"]
    titles = {"kind": "exchanged", "moved": "tokens moved", "fraction": "fraction asked for", "kl": "KL"}
    titles |= {"lower": "lower of the draws", "higher": "higher of the draws"}
    caption = f"Added loss by perturbed fraction: mean of {DRAWS} draws of the pairs (line), and each of them"
    return Shown(
        _tolerated(rows),
        [(plot_perturbation(rows), caption)],
        (rows[columns], f"Mean of {DRAWS} draws of the pairs"),
        titles,
        {"fraction": 2, "added_loss": 4, "lower": 4, "higher": 4, "kl": 4, "perplexity": 1},
    )


def _tolerated(rows: pd.DataFrame) -> list[str]:
    """State the effect of the fraction that [A] says is tolerated; nothing of a text in which no token moved."""
    rows = rows[rows["fraction"] == _TOLERATED].dropna(subset="added_loss")
    if not rows["moved"].any():
        return []
    changes = []
    for kind, mean, *draws in rows[["kind", "added_loss", "lower", "higher"]].itertuples(index=False):
        known = [x for x in draws if not pd.isna(x)] or [mean]  # a draw in which no position kept its place is NaN
        changes.append(f"{kind} {' and '.join(map(signed, known))}")
    return [
        "Exchanging 5 % of neighbours changes the loss at the other tokens, in nats per token, in "
        f"{DRAWS} draws of the pairs: {'; '.join(changes)}."
    ]


PERTURBATION = Section(
    "Robustness to perturbed word order and positions",
    """
Pairs of neighbouring tokens are exchanged: in the text, or only in the positions that RoPE receives, or independently
in each of RoPE’s subspaces (of a model without RoPE, only in the text); which pairs is drawn twice. Added loss is
measured at positions that did not move, in nats per token; 0 means no effect. [A] reports that large models tolerate
up to 5 %. Perplexity is over all positions; for the order of the text it also counts next tokens that moved.
    """,
    _measure_perturbation,
    _show_perturbation,
    positions=512,
    tokens=512,
)

# --- ablation -----------------------------------------------------------------------------------------------------

_LARGE_EFFECT = 0.01
"""Nats per token; the sentence counts heads above it."""


def _measure_ablation(subject: Subject, settings: Settings) -> pd.DataFrame:
    return head_ablation(subject.reading, subject.tokens, heads=subject.pairs, progress=settings.progress)


def _show_ablation(trained: pd.DataFrame, random: pd.DataFrame | None) -> Shown:
    drawn = plot_heads(trained, "effect", signed=True).update_layout(meta="linked")
    return Shown([_largest_effect(trained)], [(drawn, "Added loss without the head, by layer and head")])


def _largest_effect(trained: pd.DataFrame) -> str:
    effects = trained.dropna(subset="effect").sort_values("effect", ascending=False, kind="stable")
    largest, n_large = effects.iloc[0], int((effects["effect"] > _LARGE_EFFECT).sum())
    if not largest["effect"] > 0:
        return "Ablating a single head never raises the loss."
    others = ""
    if n_large > 1:
        heads = plural(len(effects), "head")
        others = f"; of {heads}, {n_large} raise it by more than {_LARGE_EFFECT} when ablated alone"
    label = head_label(int(largest["layer"]), int(largest["head"]))
    return f"Ablating {label} raises the loss most, by {number(largest['effect'])} nats per token{others}."


ABLATION = Section(
    "Head ablation",
    """
The output of one head at a time is set to zero. The number is the added loss, in nats per token, which is in the
table of all heads as well. A head with 0 has no effect on this text; if the number is negative, the loss is lower
without the head. [B] reports one head of an early layer that does nearly all of the positional work, in models
trained on a task that needs positions; the added loss here includes all other effects of a head as well.
    """,
    _measure_ablation,
    _show_ablation,
    positions=96,
    tokens=384,
    closed=True,
)

SECTIONS: Final[dict[SectionName, Section]] = {
    "where_or_what": WHERE_OR_WHAT,
    "additivity": ADDITIVITY,
    "distance": DISTANCE,
    "shares": SHARES,
    "labels": LABELS,
    "perturbation": PERTURBATION,
    "ablation": ABLATION,
}
"""All sections by their names, in the order of the page."""
