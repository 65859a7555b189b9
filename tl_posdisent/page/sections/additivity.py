"""The section ``additivity``: the correlation of each head's scores with an additive fit."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import pandas as pd
from markupsafe import Markup

from tl_posdisent.experiments.attention_scores.additivity import additivity
from tl_posdisent.experiments.attention_scores.score_controls import ScoreControl
from tl_posdisent.page.deciding.against_foreign_keys import FOREIGN_KEYS, compare_with_foreign_keys
from tl_posdisent.page.deciding.against_random import compare_with_random
from tl_posdisent.page.deciding.links import link_head, link_section
from tl_posdisent.page.deciding.words import number
from tl_posdisent.page.drawing.maps import head_map, with_attention
from tl_posdisent.page.drawing.markup import ROWS, render, table
from tl_posdisent.page.measuring.measurement import HEAD, Measurement, Settings, by_head
from tl_posdisent.page.measuring.random_copies import measure_subject, with_baseline
from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.page.sections.section import Content, Measured, Section
from tl_posdisent.utils.validation import head_label
from tl_posdisent.utils.words import plural
from tl_posdisent.viz.plots.heatmaps import bounded_limits, plot_heads

SHARES = ["share_distance", "share_query", "share_key"]
"""The columns with the share of the variance that one component alone explains."""
HELD_OUT = "r_held_out"
"""The correlation with the distance component of the other texts, a column if there are several texts."""
_FITS = {
    "r": "the three-axis fit",
    HELD_OUT: "distance + query + key, with the distance component of the other texts,",
}


def measure_additivity(subject: Subject, *, controls: Collection[ScoreControl] = ()) -> pd.DataFrame:
    """Run ``additivity`` on all texts."""
    return measure_subject(partial(additivity, controls=controls), subject)


def _measure(subject: Subject, settings: Settings, _: Measured) -> Measurement:
    return with_baseline(_with_foreign_keys(subject), measure_additivity, subject, settings)


def _with_foreign_keys(subject: Subject) -> pd.DataFrame:
    """Measure additivity, with that of foreign keys as a column where the model allows this control."""
    try:
        table = measure_additivity(subject, controls=["foreign keys"])
    except ValueError as error:  # scores that are not those of queries and keys alone, or the model's only layer
        table = measure_additivity(subject)
        table.attrs["failures"] = {"controls": str(error)}
        return table
    rows = {scores: part.reset_index(drop=True) for scores, part in table.groupby("scores")}
    trained = rows["own"].drop(columns="scores")
    return trained.assign(**{FOREIGN_KEYS: rows["foreign keys"][_main_correlation(trained)]})


def _main_correlation(table: pd.DataFrame) -> str:
    """Return the column that best separates trained from random weights."""
    return HELD_OUT if HELD_OUT in table else "r"


def _passes(subject: Subject, settings: Settings) -> float:
    return (1 + settings.copies) * subject.n_run


def _show(subject: Subject, measurement: Measurement) -> Content:
    random = None if measurement.random is None else by_head(measurement.random)
    values = {
        "maps": _maps(subject, by_head(measurement.trained), random),
        "by_layer": _table_of_layers(subject, by_head(measurement.trained), measurement.random),
        "every": _table_of_heads(subject, by_head(measurement.trained), random),
    }
    return Content(render("sections/additivity", **values))


def _maps(subject: Subject, trained: pd.DataFrame, random: pd.DataFrame | None) -> list[Markup]:
    """Draw the main correlation of each head, and that of random weights in the same colours."""
    main = _main_correlation(trained)
    title = "r" if main == "r" else "held-out r"
    both = trained if random is None else pd.concat([trained, random])
    limits = bounded_limits(main, both[main])
    drawn = plot_heads(trained, main, limits=limits)
    maps = [head_map(drawn, f"{title} of this model", subject, linked=len(trained) <= ROWS)]
    if random is not None:
        maps.append(head_map(plot_heads(random, main, limits=limits), f"{title} at random initialisation", subject))
    return maps


def _table_of_layers(subject: Subject, trained: pd.DataFrame, random: pd.DataFrame | None) -> Markup:
    """List mean, lowest and highest *r* of each layer, and the means of the baselines."""
    by_layer = trained.groupby("layer")["r"].agg(["mean", "min", "max"]).reset_index()
    by_layer.columns = pd.Index(["layer", "mean r", "lowest", "highest"])

    def add_means(title: str, table: pd.DataFrame | None, column: str) -> None:
        if table is not None and column in table:
            by_layer[title] = by_layer["layer"].map(table.groupby("layer")[column].mean())

    add_means("random", random, "r")
    add_means(FOREIGN_KEYS, trained, FOREIGN_KEYS)
    if HELD_OUT in trained:
        add_means("held-out", trained, HELD_OUT)
        add_means("random held-out", random, HELD_OUT)
    for name in ("share_distance", "share_key"):
        add_means(_title(name), trained, name)
        add_means(f"random {_title(name)}", random, name)
    caption = "By layer: r (mean, lowest and highest of its heads), and mean shares"
    return table("layers-r", caption, with_attention(by_layer, subject.attention))


def _table_of_heads(subject: Subject, trained: pd.DataFrame, random: pd.DataFrame | None) -> Markup:
    """List all correlations and shares of each head; of many heads, the most positional ones first."""
    held_out = [HELD_OUT] if HELD_OUT in trained else []
    columns = [*HEAD, *held_out, "r", *SHARES]
    rows = trained
    if random is not None:
        rows = rows.merge(random[[*HEAD, "r", *held_out]], on=HEAD, suffixes=("", "_random"), how="left")
        columns += [*(f"{name}_random" for name in held_out), "r_random"]
    columns += [*([FOREIGN_KEYS] if FOREIGN_KEYS in trained else []), "r2_adjusted"]
    if len(rows) > ROWS:
        rows = rows.sort_values("share_distance", ascending=False, kind="stable", na_position="last")
    titles = {"r2_adjusted": "adjusted r²", "r_random": "random r"}
    titles |= {HELD_OUT: "held-out r", f"{HELD_OUT}_random": "random held-out r"}
    titles |= {name: _title(name) for name in SHARES}
    return table("heads-r", "Every head, mean over texts", with_attention(rows[columns], subject.attention), titles)


def _sentences(measurement: Measurement) -> list[Markup]:
    heads = by_head(measurement.trained).dropna(subset="r")
    if heads.empty:
        return [Markup("No head has scores that vary in this text.")]
    main = _main_correlation(measurement.trained)
    return [
        _mean_shares(measurement),
        _most_positional(heads),
        *compare_with_random(measurement, main, _FITS[main], ADDITIVITY.name),
        *compare_with_foreign_keys(measurement, main, ADDITIVITY.name),
    ]


def _title(share: str) -> str:
    """``distance alone`` for ``share_distance``."""
    return f"{share.removeprefix('share_')} alone"


def _mean_shares(measurement: Measurement) -> Markup:
    """State the shares of distance and key, beside those of random weights."""
    names = ("share_distance", "share_key")
    means = [f"{100 * by_head(measurement.trained)[name].mean():.0f} %" for name in names]
    sentence = Markup(
        "Of the variance of a head’s scores, the distance alone explains {} and the key alone {} on average"
    )
    random = Markup()
    if measurement.random is not None:
        at_random = [f"{100 * measurement.random[name].mean():.0f} %" for name in names]
        random = Markup("; with random weights {} and {}").format(*at_random)
    return sentence.format(*means) + random + Markup(" {}.").format(link_section(ADDITIVITY.name, measurement))


def _most_positional(heads: pd.DataFrame) -> Markup:
    """Name the three heads with the largest share of the distance alone."""
    top = heads.sort_values("share_distance", ascending=False, kind="stable").head(3)
    labels = [
        link_head(*pair) if len(heads) <= ROWS else head_label(*pair) for pair in top[HEAD].astype(int).to_numpy()
    ]
    shares = [number(share, 2) for share in top["share_distance"]]
    names = [Markup("{} ({})").format(label, share) for label, share in zip(labels, shares, strict=True)]
    sentence = Markup("Of {}, the share of the distance alone is largest in {}.")
    return sentence.format(plural(len(heads), "head"), Markup(", ").join(names))


ADDITIVITY = Section("additivity", "What the scores look like", _measure, _passes, _show, _sentences)
