"""The section ``where_or_what``: what the contribution of each head to the predictions needs, by intervention."""

from __future__ import annotations

from functools import partial
from typing import Final, get_args

import pandas as pd
import plotly.graph_objects as go

from tl_posdisent.experiments.where_what.replacements import CONSTANTS
from tl_posdisent.experiments.where_what.shares import NEGLIGIBLE, Verdict
from tl_posdisent.experiments.where_what.where_or_what import where_or_what
from tl_posdisent.page.section import Section, Settings, Shown
from tl_posdisent.page.subject import Subject
from tl_posdisent.page.words import counted, number
from tl_posdisent.utils.words import plural
from tl_posdisent.viz.palette import GREY
from tl_posdisent.viz.plots.plane import plot_where_or_what

_EXACT: Final = 6
"""Heads of the largest contribution that are run."""
_LABELS, _HEIGHT = 8, 560
"""Heads of the largest contribution that are labelled in the plane, and its height in pixels."""

_ABOUT = f"""
What a head contributes to the predictions is their divergence when its output is replaced by its mean over other
texts, in nats per predicted token. Two replacements of its attention keep a part of this contribution: distances alone,
the best attention that depends on the distance and the first token only, fitted to other texts; and content alone,
every key but the query’s own at one distance, the best of {", ".join(map(str, CONSTANTS))}. Each share of the
contribution that survives is one axis; it is shown as 0 where the replacement does more harm than the head contributes.
A head needs “where” keys are if distances alone keep more than half and content alone does not; “what” they are, the
other way round; “both” together if neither keeps half; “either” if each does; and “neither”, so that its pattern does
not matter, if uniform attention does so too. A head is “undecided” if one of these shares is not surely above or below
a half, with 95 % over texts, and “not used” if it surely contributes less than {NEGLIGIBLE:g} nats. Divergences are
estimated for all heads at once, and measured by runs for the {_EXACT} heads that contribute most.
"""


def _measure(subject: Subject, settings: Settings, *, exact: int) -> pd.DataFrame:
    progress = settings.progress and exact > 0  # a second bar, of a copy, would look like the model's
    options = {"exact": exact, "seed": settings.seed, "progress": progress}
    return where_or_what(subject.reading, subject.tokens, heads=subject.pairs, **options)  # type: ignore[arg-type]


def _show(trained: pd.DataFrame, random: pd.DataFrame | None) -> Shown:
    drawn = plot_where_or_what(trained, labels=_LABELS).update_layout(height=_HEIGHT, meta="linked")
    caption = "Share of each head’s contribution that survives with distances alone, and with content alone"
    sentences = [_answer(trained)]
    if random is not None:
        _add_copies(drawn, random)
        caption += "; crosses: heads with random weights"
        sentences.append(_copies(random))
    return Shown(sentences, [(drawn, caption)])


def _add_copies(drawn: go.Figure, random: pd.DataFrame) -> None:
    """Draw the heads of random copies as grey crosses, behind those of the model."""
    used = random[random["verdict"] != "not used"]
    marker = {"symbol": "x-thin", "size": 6, "line": {"color": GREY, "width": 1}}
    drawn.add_scatter(
        x=used["where"], y=used["what"], mode="markers", name="random weights", marker=marker, hoverinfo="skip"
    )
    drawn.data = (drawn.data[-1], *drawn.data[:-1])


def _answer(trained: pd.DataFrame) -> str:
    """Count the verdicts, and state how large the errors over texts are."""
    used = trained[trained["verdict"] != "not used"]
    if used.empty:
        return trained.attrs["statement"]
    where, what = (number(used[f"{share}_se"].median(), 2) for share in ("where", "what"))
    return (
        f"{trained.attrs['statement']} The shares that survive with distances alone and with content alone have standard "
        f"errors over texts of {where} and {what} (medians of the heads that contribute)."
    )


def _copies(random: pd.DataFrame) -> str:
    """State where the heads of random copies lie, and their verdicts."""
    used, heads = random[random["verdict"] != "not used"], plural(len(random), "head")
    if used.empty:
        return f"With random weights, none of {heads} contributes measurably."
    verdicts = {name: n for name in get_args(Verdict) if (n := int((used["verdict"] == name).sum()))}
    where, what = (_middle_and_range(used[name]) for name in ("where", "what"))
    return (
        f"With random weights, {len(used)} of {heads} contribute measurably: distances alone keep {where}, content "
        f"alone {what} (medians, and from 5 to 95 % of the heads): {counted(verdicts)}."
    )


def _middle_and_range(shares: pd.Series) -> str:
    """Format the median, and the quantiles of 5 and 95 %."""
    low, middle, high = (number(float(shares.quantile(q)), 2) for q in (0.05, 0.5, 0.95))
    return f"{middle} ({low} to {high})"


WHERE_OR_WHAT = Section(
    "Where or what",
    _ABOUT,
    partial(_measure, exact=_EXACT),
    _show,
    measure_copy=partial(_measure, exact=0),
    positions=72,
    tokens=576,
)
