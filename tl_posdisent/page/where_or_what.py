"""The section ``where_or_what``: what the contribution of each head to the predictions depends on, by intervention."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import pandas as pd
import plotly.graph_objects as go

from tl_posdisent.experiments.where_what.head_table import opened, verdict_table
from tl_posdisent.experiments.where_what.measurement import Exact
from tl_posdisent.experiments.where_what.replacements import CONSTANTS
from tl_posdisent.experiments.where_what.verdicts import NEGLIGIBLE, Verdict
from tl_posdisent.experiments.where_what.where_or_what import where_or_what
from tl_posdisent.models.running.cut_text import LENGTH, MOST
from tl_posdisent.page.section import Section, Settings, Shown
from tl_posdisent.page.subject import Subject
from tl_posdisent.page.words import counted, number
from tl_posdisent.utils.words import plural
from tl_posdisent.viz.plots.plane import plot_where_or_what

_LABELS, _HEIGHT, _TITLE = 8, 560, 70
"""Heads of the largest contribution that are labelled in the plane, its height in pixels, and that of a plot's title,
which a report's figure does not have."""

_ABOUT = f"""
What a head contributes to the predictions is their divergence when its output is replaced by its mean over other
texts, in nats per predicted token, without the first position. Three replacements of its attention keep a share of this
contribution: attention by the distance and the first token only, fitted to other texts (p); content alone, every key
but the query’s own at one distance, the best of {", ".join(map(str, CONSTANTS))} (c); and uniform attention (u). With
these shares from 0 to 1, and p and c at least u, the contribution has three parts, which sum to one: neither is u,
where is the mean of p − u and 1 − c, what is the mean of c − u and 1 − p. Joint is 1 − p − c + u: above 0 where and
what are needed together, below 0 either serves. Gate is the share that the head’s own attention to the first token
keeps, with uniform attention to the other keys. A head is “neither” if u is surely above a half, “mixed” if the parts
where and what surely differ by less than .2, “where” or “what” if one of them is surely larger, with 95 % over texts;
“not used” if it surely contributes less than {NEGLIGIBLE:g} nats; else “undecided”. Parts are of single heads, each
replaced alone. Divergences are estimated for all heads at once, and measured by runs for those that
contribute most.
"""


def _measure(subject: Subject, settings: Settings, *, exact: Exact) -> pd.DataFrame:
    progress = settings.progress and exact != 0  # a second bar, of a copy, would look like the model's
    options = {"exact": exact, "seed": settings.seed, "progress": progress}
    return where_or_what(subject.reading, subject.tokens, heads=subject.pairs, **options)  # type: ignore[arg-type]


def _show(trained: pd.DataFrame, random: pd.DataFrame | None) -> Shown:
    drawn = plane(trained, random=random)
    caption = "Parts of each head’s contribution: where, what, and, towards the lower left corner, neither"
    sentences = [_answer(trained)]
    if may := opened(trained):
        sentences.append(f"Of the undecided heads, {may}.")
    if random is not None:
        caption += "; crosses: heads with random weights"
        sentences.append(_copies(random))
    of_table = "Heads by verdict, their share of the contributions, and the three that contribute most"
    return Shown(sentences, [(drawn, caption)], (verdict_table(trained), of_table), table_first=True)


def plane(table: pd.DataFrame, **others: Any) -> go.Figure:
    """Draw the heads of a table, whose panels a click opens; ``others`` are other tables of ``plot_where_or_what``."""
    drawn = plot_where_or_what(table, labels=_LABELS, height=_HEIGHT + _TITLE, title="", **others)
    return drawn.update_layout(height=_HEIGHT, meta="linked")


def _answer(trained: pd.DataFrame) -> str:
    """Return the answer without the counts, which the table has, and say what its errors and those of heads are."""
    used = trained[trained["verdict"] != "not used"]
    answer = f"{trained.attrs['answer']} Here ± is a standard error over texts"
    if used.empty:
        return f"{answer}."
    where, what = (number(used[f"{part}_part_se"].median(), 2) for part in ("where", "what"))
    return f"{answer}. The median error of a single head that contributes is {where} for where and {what} for what."


def _copies(random: pd.DataFrame) -> str:
    """State the parts of the heads of random copies, and their verdicts."""
    used, heads = random[random["verdict"] != "not used"], plural(len(random), "head")
    if used.empty:
        return f"With random weights, none of {heads} contributes measurably."
    verdicts = {name: n for name in get_args(Verdict) if (n := int((used["verdict"] == name).sum()))}
    parts = ", ".join(f"{part} {_middle_and_range(used[f'{part}_part'])}" for part in ("where", "what", "neither"))
    return (
        f"With random weights, {len(used)} of {heads} contribute measurably: {parts} (medians, and from 5 to 95 % of "
        f"the heads): {counted(verdicts)}."
    )


def _middle_and_range(parts: pd.Series) -> str:
    """Format the median, and the quantiles of 5 and 95 %."""
    low, middle, high = (number(float(parts.quantile(q)), 2) for q in (0.05, 0.5, 0.95))
    return f"{middle} ({low} to {high})"


WHERE_OR_WHAT = Section(
    "Where or what",
    _ABOUT,
    partial(_measure, exact="half"),
    _show,
    measure_copy=partial(_measure, exact=0),
    positions=LENGTH,
    tokens=LENGTH * MOST,
)
