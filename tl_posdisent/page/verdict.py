"""The opening of a report: its verdict, and a table of its correlations and those of the papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from markupsafe import Markup

from tl_posdisent.experiments.causal.head_verdicts import NEGLIGIBLE, head_verdicts
from tl_posdisent.experiments.measuring.above_random import above_random
from tl_posdisent.page.atlas import label_words
from tl_posdisent.page.every_head import IDLE
from tl_posdisent.page.looks import AS_RANDOM, KINDS, looks_at, looks_of_random
from tl_posdisent.page.markup import head_link, part, render, table
from tl_posdisent.page.measurements import Found, SectionName, by_head, told_apart
from tl_posdisent.page.subject import ENOUGH, PERTURBATIONS, Subject
from tl_posdisent.page.words import MISSING, are, number, signed
from tl_posdisent.utils.statistics import error_over_draws
from tl_posdisent.utils.validation import head_label
from tl_posdisent.utils.words import plural

_MATTERS = 0.01  # nats per token
_LEAD = 3  # sentences that are shown at first
_FEW = 0.05  # the share of tokens that may be out of place according to [A]


def verdict(found: Mapping[SectionName, Found]) -> Markup:
    """Summarise the report in three sentences and, on request, more: computed from the data, linked to their sections.

    The three are the first sentences of the first sections in ``_VERDICTS`` that have some.
    """
    measured = {name: one for name, one in found.items() if not one.refused}
    written = [(measured[name], write(measured[name])) for name, write in _VERDICTS.items() if name in measured]
    written = [(one, sentences) for one, sentences in written if sentences]
    lead = [sentences[0] for _, sentences in written[:_LEAD]]
    more: list[Any] = []
    for n, (one, sentences) in enumerate(written):
        more += [*sentences[n < _LEAD :], *([one.agreement] if one.run else [])]
    return render("verdict", lead=lead, more=more) if lead else Markup()


def link(section: SectionName, found: Found) -> Markup:
    """Return a link to a section, its name in brackets, with the texts that it read and the heads that were run."""
    read = f", {found.read.sizes()}" if found.read else ""
    run = f"; estimated for all but {plural(len(found.run), 'head')}" if found.run else ""
    return Markup('(<a href="#{0}">{0}</a>{1})').format(section, read + run)


def _additive_verdict(found: Found) -> list[Markup]:
    heads = by_head(found.trained).dropna(subset="r")
    if heads.empty:
        return [Markup("No head has scores that vary in this text.")]
    top = heads.sort_values("share_distance", ascending=False, kind="stable").head(3)
    names = [head_link(x["layer"], x["head"]) + f" ({number(x['share_distance'], 2)})" for _, x in top.iterrows()]
    column = told_apart(found.trained)
    most = Markup("Of {}, the share of the distance alone is largest in {}.")
    return [
        *_looks(found),
        most.format(plural(len(heads), "head"), Markup(", ").join(names)),
        *_against_random(found, column, _FITS[column], "additivity"),
        *_against_controls(found, column),
    ]


_FITS = {
    "r": "the three-axis fit",
    "r_held_out": "distance + query + key, with the distance component of the other texts,",
}


def _against_controls(found: Found, column: str) -> list[Markup]:
    """Compare the mean r with that of scores that no head computes."""
    trained = found.trained
    if "r, foreign keys" not in trained or trained["r, foreign keys"].isna().all():
        return []
    own = trained.assign(difference=trained[column] - trained["r, foreign keys"])
    mean, error = own["difference"].mean(), error_over_draws(own, "difference", ["batch"])
    said = f"{signed(mean)} ± {number(error, 3)}" if error else signed(mean)
    sentence = Markup(
        "The queries of each head with the keys of another key head, scores that no head computes, have an <em>r</em> "
        "of {}: own minus other keys is {}{} {}."
    )
    foreign, concluded = number(trained["r, foreign keys"].mean(), 2), Markup(_compared(mean, error))
    return [sentence.format(foreign, said, concluded, link("additivity", found))]


def _compared(mean: float, error: float) -> str:
    """Say which keys have the larger mean r, given the standard error of the difference; not why."""
    if not error:
        return ""
    if mean > 2 * error:
        return ", so on average heads are more additive with their own keys"
    if mean < -2 * error:
        return ", so on average heads are less additive with their own keys"
    return ", so on average <em>r</em> does not tell own keys from other keys"


_DEPENDS = {"where": "more on where a key is", "what": "more on what it is"}


def _looks(found: Found) -> list[Markup]:
    """Count the heads that look at *where* and at *what*, then state the rule, and what chance decides by it."""
    counts = _counts(looks_at(found.trained, found.random)["looks"])
    texts = found.trained["batch"].nunique() if "batch" in found.trained else 1
    decided = ", ".join(f"{said} in {counts[kind]}" for kind, said in _DEPENDS.items() if counts[kind])
    clauses = [f"the scores depend {decided}"] if decided else []
    if n := counts[AS_RANDOM]:
        clauses.append(f"{are(n)} like random weights")
    if n := counts["undecided"]:
        few = f", and it takes at least {ENOUGH} texts to decide" if texts < ENOUGH else ""
        clauses.append(f"{are(n)} undecided{few}")
    heads, read = plural(sum(counts.values()), "head"), link("additivity", found)
    first = Markup("Of {}, {} {}.").format(heads, "; ".join(clauses), read)
    rule = Markup(
        "A head is decided if the share of its scores’ variance that the key alone explains, minus that of the "
        "distance alone, is surely below (<em>where</em>) or above (<em>what</em>) {}, by a 95 % interval over texts{}."
    )
    if found.random is None:
        return [first, rule.format("0", "; without a random-weights baseline this may not have been learned")]
    by_chance = _counts(looks_of_random(found.random))
    tried = plural(sum(by_chance.values()), "head")
    passed = sum(by_chance[kind] for kind in _DEPENDS) or "none"
    beyond = f"0 and every head of its layer in {copies_in(found.random)}"
    chance = "; beyond 0 alone it is like random weights" if counts[AS_RANDOM] else ""
    chance += f"; of {tried} with random weights, the same rule decides {passed}" if texts > 1 else ""
    return [first, rule.format(beyond, chance)]


def _counts(looks: pd.Series) -> dict[str, int]:
    return {kind: int((looks == kind).sum()) for kind in KINDS}


def copies_in(random: pd.DataFrame) -> str:
    return plural(random["seed"].nunique(), "random copy", "random copies")


def _against_random(found: Found, column: str, model: str, section: SectionName) -> list[Markup]:
    """Compare the mean with that of random weights, and state how many heads exceed these."""
    if found.random is None or found.trained[column].isna().all():
        return []
    mean, chance = (_with_error(table, column) for table in (found.trained, found.random))
    n = found.trained["batch"].nunique() if "batch" in found.trained else 1
    above = above_random(found.trained, found.random, column)
    sentence = Markup(
        "<em>r</em> of {} is {} on average, that of random weights {} ({}, {}; ± is a standard error over texts and "
        "copies, if there are several); {} {}."
    )
    texts, copies = plural(n, "text"), copies_in(found.random)
    return [sentence.format(model, mean, chance, texts, copies, above, link(section, found))]


def _with_error(table: pd.DataFrame, column: str) -> str:
    """Format the mean over heads, texts and copies, ± its standard error if there are several texts or copies."""
    mean, error = number(by_head(table)[column].mean(), 2), error_over_draws(table, column, ["batch", "seed"])
    return f"{mean} ± {number(error, 2)}" if error else mean


def _perturbation_verdict(found: Found) -> list[Markup]:
    rows = found.trained[found.trained["fraction"] == _FEW]
    if rows.empty or not rows["moved"].any():
        return []
    what = {"order": "tokens of the text", "index": "positions", "feature": "phases of RoPE"}
    changes = []
    for _, row in rows.dropna(subset="added_loss").iterrows():
        error = "" if pd.isna(row["added_loss_se"]) else f" ± {number(row['added_loss_se'])}"
        changes.append(f"{what[row['kind']]} {signed(row['added_loss'])}{error}")
    sentence = Markup(
        "Exchanging 5 % of neighbours changes the loss at the other tokens, in nats per token (± standard error over "
        "{} draws of the pairs): {} {}."
    )
    return [sentence.format(PERTURBATIONS, "; ".join(changes), link("perturbation", found))]


def _ablation_verdict(found: Found) -> list[Markup]:
    drops = found.trained.dropna(subset="effect").sort_values("effect", ascending=False, kind="stable")
    most, worse = drops.iloc[0], int((drops["effect"] > _MATTERS).sum())
    if not most["effect"] > 0:
        return [Markup("Ablating a single head never raises the loss {}.").format(link("ablation", found))]
    label, effect = head_label(int(most["layer"]), int(most["head"])), number(most["effect"])
    effect = effect if most["exact"] else f"an estimated {effect}"
    others = f"; of {plural(len(drops), 'head')}, {worse} raise it by more than {_MATTERS} when ablated alone"
    sentence = Markup("Ablating {} raises the loss most, by {} nats per token{} {}.")
    return [sentence.format(label, effect, others if worse > 1 else "", link("ablation", found))]


def _ladder_verdict(found: Found) -> list[Markup]:
    verdicts = head_verdicts(found.trained)
    used = _used(verdicts)
    count, unsure = int(used.sum()), int((~used & ~verdicts["verdict"].isin(IDLE)).sum())
    said = f"{count or 'none'} of {plural(len(verdicts), 'head')}"
    rest = f"; {are(unsure)} undecided" if unsure else ""
    first = Markup("The predictions depend on {}{}, by more than {} nats per token{} {}.")
    if not count:
        return [first.format(said, "", NEGLIGIBLE, rest, link("ladder", found))]
    sure = int(_used(head_verdicts(found.trained, correction="fdr")).sum())
    held = f" ({sure} with the false discovery rate held at 5 %)"
    first = first.format(said, held, NEGLIGIBLE, rest, link("ladder", found))
    n = verdicts[used]["verdict"].value_counts()
    kinds = ("first token", "distance", "static", "additive", "more than additive")
    second = Markup(
        "They diverge by so much both with the head’s mean output in its place and with uniform attention there. By "
        "the simplest attention that recovers 95 % of the latter divergence, the {} are: {}."
    ).format(count, _counted({kind: int(n[kind]) for kind in (*kinds, "undecided") if kind in n}))
    third = Markup(
        "Each head has a 95 % interval of its own: of {} heads that diverge by no more than {} nats, at most {} would "
        "be counted by chance."
    )
    return [first, second, third.format(len(verdicts), NEGLIGIBLE, number(0.025 * len(verdicts), 1))]


def _used(verdicts: pd.DataFrame) -> pd.Series:
    """Whether a head surely changes the predictions, with its mean output in its place and with uniform attention."""
    return ~verdicts["simplest"].isin(["mean_output", "uniform"])


def _counted(numbers: Mapping[Any, int]) -> Markup:
    """``3 <em>distance</em>, 1 <em>static</em>``."""
    return Markup(", ").join(Markup("{} <em>{}</em>").format(n, kind) for kind, n in numbers.items())


def _labels_verdict(found: Found) -> list[Markup]:
    labels = label_words(found.trained)["label"]
    counts = labels.str.split(" + ", regex=False).explode().value_counts()
    if labels.isna().all():
        return []
    sentence = Markup("{} of {} have a label, by the keys that they attend to: {} {}.")
    counted = _counted(counts.to_dict())
    if counts.sum() > labels.notna().sum():
        counted += Markup("; a head can have several")
    return [sentence.format(labels.notna().sum(), plural(len(labels), "head"), counted, link("labels", found))]


_VERDICTS: dict[SectionName, Callable[[Found], list[Markup]]] = {
    "additivity": _additive_verdict,
    "ladder": _ladder_verdict,
    "ablation": _ablation_verdict,
    "labels": _labels_verdict,
    "shares": lambda found: _against_random(found, "r_two_axis", "the two-axis model", "shares"),
    "perturbation": _perturbation_verdict,
}


def headline(subject: Subject, found: Mapping[SectionName, Found]) -> Markup:
    """Render the correlations of this model beside those of the papers."""
    claims: dict[str, tuple[SectionName, str, str | Markup]] = {
        "r, two-axis model, at controlled distances": (
            "shares",
            "r_two_axis",
            Markup("0.959 {}, if its sum is read so; random initialisation far lower").format(part("A")),
        ),
        "r, three-axis model, at controlled distances": (
            "shares",
            "r_three_axis",
            Markup("0.959 {}, by its table").format(part("A")),
        ),
        "r, three-axis fit of the text’s own scores": ("additivity", "r", MISSING),
        "r, three-axis fit with the distance component of the other texts": ("additivity", "r_held_out", MISSING),
    }
    rows = []
    for measure, (name, column, papers) in claims.items():
        one, random = found.get(name), MISSING
        if one is None or one.refused:
            here = "not requested" if one is None else "not measured" if one.failed else "not for this model"
        elif column not in one.trained:
            here = "needs two texts"
        else:
            r = by_head(one.trained)[column]
            here = f"{number(r.mean())} ({number(r.min())} to {number(r.max())})" if len(r) > 1 else number(r.mean())
            here = here if r.notna().any() else "undefined: no head’s scores vary"
            random = MISSING if one.random is None else f"{number(one.random[column].mean())} ({copies_in(one.random)})"
        rows.append({"measure": measure, "this model": here, "random": random, "the papers": papers})
    return render(
        "headline",
        table=table("headline", "The papers’ claims, and this model", pd.DataFrame(rows, dtype=object)),
        tokens=sum(subject.lengths),
        small=subject.n_parameters < 1e8,
    )
