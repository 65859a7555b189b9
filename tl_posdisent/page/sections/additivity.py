"""The section ``additivity``: the correlation of each head's scores with an additive fit."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pandas as pd
from markupsafe import Markup

from tl_posdisent.experiments.attention_scores.additivity import additivity
from tl_posdisent.experiments.attention_scores.score_controls import ScoreControl
from tl_posdisent.page.deciding.against_foreign_keys import FOREIGN_KEYS, compare_with_foreign_keys
from tl_posdisent.page.deciding.against_random import compare_with_random
from tl_posdisent.page.deciding.count_where_or_what import count_where_or_what
from tl_posdisent.page.deciding.links import link_head
from tl_posdisent.page.deciding.words import number
from tl_posdisent.page.drawing.maps import head_map, with_attention
from tl_posdisent.page.drawing.markup import ROWS, render, table
from tl_posdisent.page.measuring.measurement import HEAD, Measurement, Settings, by_head
from tl_posdisent.page.measuring.random_copies import with_baseline
from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.page.sections.section import Content, Section
from tl_posdisent.utils.words import plural
from tl_posdisent.viz.plots.heatmaps import bounded_limits, plot_heads

SHARES = ["share_distance", "share_query", "share_key"]
"""The columns with the share of the variance that one component alone explains."""
HELD_OUT = "r_held_out"
"""The correlation with the distance component of the other texts, a column if there are several texts."""
_LEAST_TOKENS = 3
"""Texts of at most this many tokens are fitted with their first key only."""
_FITS = {
    "r": "the three-axis fit",
    HELD_OUT: "distance + query + key, with the distance component of the other texts,",
}


def measure_additivity(subject: Subject, *, sinks: int = 0, controls: Collection[ScoreControl] = ()) -> pd.DataFrame:
    """Run ``additivity`` on all texts, without the first ``sinks`` keys."""
    return additivity(
        subject.reading,
        subject.tokens,
        attention_mask=subject.mask,
        layers=subject.asked_layers,
        heads=subject.asked_heads,
        sinks=sinks,
        controls=controls,
        progress=False,
    )


def _measure(subject: Subject, settings: Settings) -> Measurement:
    table = _with_foreign_keys(subject)
    table["r_without_first"] = _r_without_first_key(subject)
    return with_baseline(table, measure_additivity, subject, settings)


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


def _r_without_first_key(subject: Subject) -> pd.Series | float:
    """Measure *r* of fits without the first key, which often is an attention sink; NaN for very short texts."""
    return measure_additivity(subject, sinks=1)["r"] if min(subject.lengths) > _LEAST_TOKENS else np.nan


def _main_correlation(table: pd.DataFrame) -> str:
    """Return the column that best separates trained from random weights."""
    return HELD_OUT if HELD_OUT in table else "r"


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

    add_means("without the first token", trained, "r_without_first")
    add_means("random", random, "r")
    add_means(FOREIGN_KEYS, trained, FOREIGN_KEYS)
    if HELD_OUT in trained:
        add_means("held-out", trained, HELD_OUT)
        add_means("random held-out", random, HELD_OUT)
    caption = "r by layer: mean, lowest and highest of its heads"
    return table("layers-r", caption, with_attention(by_layer, subject.attention))


def _table_of_heads(subject: Subject, trained: pd.DataFrame, random: pd.DataFrame | None) -> Markup:
    """List all correlations and shares of each head; of many heads, the most positional ones first."""
    held_out = [HELD_OUT] if HELD_OUT in trained else []
    columns = [*HEAD, *held_out, "r", *SHARES]
    rows = trained
    if random is not None:
        rows = rows.merge(random[[*HEAD, "r", *held_out]], on=HEAD, suffixes=("", "_random"), how="left")
        columns += [*(f"{name}_random" for name in held_out), "r_random"]
    columns += [*([FOREIGN_KEYS] if FOREIGN_KEYS in trained else []), "r_without_first", "r2_adjusted"]
    if len(rows) > ROWS:
        rows = rows.sort_values("share_distance", ascending=False, kind="stable", na_position="last")
    titles = {"r2_adjusted": "adjusted r²", "r_random": "random r", "r_without_first": "r without the first token"}
    titles |= {HELD_OUT: "held-out r", f"{HELD_OUT}_random": "random held-out r"}
    titles |= {name: f"{name.removeprefix('share_')} alone" for name in SHARES}
    return table("heads-r", "Every head, mean over texts", with_attention(rows[columns], subject.attention), titles)


def _sentences(measurement: Measurement) -> list[Markup]:
    heads = by_head(measurement.trained).dropna(subset="r")
    if heads.empty:
        return [Markup("No head has scores that vary in this text.")]
    main = _main_correlation(measurement.trained)
    return [
        *count_where_or_what(measurement, ADDITIVITY.name),
        _most_positional(heads),
        *compare_with_random(measurement, main, _FITS[main], ADDITIVITY.name),
        *compare_with_foreign_keys(measurement, main, ADDITIVITY.name),
    ]


def _most_positional(heads: pd.DataFrame) -> Markup:
    """Name the three heads with the largest share of the distance alone."""
    top = heads.sort_values("share_distance", ascending=False, kind="stable").head(3)
    names = [
        link_head(row["layer"], row["head"]) + f" ({number(row['share_distance'], 2)})" for _, row in top.iterrows()
    ]
    sentence = Markup("Of {}, the share of the distance alone is largest in {}.")
    return sentence.format(plural(len(heads), "head"), Markup(", ").join(names))


ADDITIVITY = Section("additivity", "Additivity of each head", _measure, _show, _sentences)
