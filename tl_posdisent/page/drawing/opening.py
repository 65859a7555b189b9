"""The opening of a report: its verdict, and a table of its correlations and those of the papers."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from markupsafe import Markup

from tl_posdisent.page.deciding.against_random import count_copies
from tl_posdisent.page.deciding.words import MISSING, number
from tl_posdisent.page.drawing.markup import part, render, table
from tl_posdisent.page.measuring.measurement import Measurement, by_head
from tl_posdisent.page.measuring.subject import Subject

_LEAD = 3
"""Number of sentences that are shown at first."""


def verdict(sentences_by_section: Sequence[Sequence[Markup]]) -> Markup:
    """Render the sentences of the sections: the first of the first three sections, and the others on request.

    Sections without sentences are left out; empty if none has any.
    """
    sections = [sentences for sentences in sentences_by_section if sentences]
    lead = [sentences[0] for sentences in sections[:_LEAD]]
    more = [sentence for place, sentences in enumerate(sections) for sentence in sentences[place < _LEAD :]]
    return render("verdict", lead=lead, more=more) if lead else Markup()


def headline(subject: Subject, shares: Measurement | None, additivity: Measurement | None) -> Markup:
    """Render the correlations of this model beside those of the papers; None for a section that was not requested."""
    two_axis = Markup("0.959 {}, if its sum is read so; random initialisation far lower").format(part("A"))
    three_axis = Markup("0.959 {}, by its table").format(part("A"))
    held_out = "r, three-axis fit with the distance component of the other texts"
    rows = [
        _row("r, two-axis model, at controlled distances", shares, "r_two_axis", two_axis),
        _row("r, three-axis model, at controlled distances", shares, "r_three_axis", three_axis),
        _row("r, three-axis fit of the text’s own scores", additivity, "r", MISSING),
        _row(held_out, additivity, "r_held_out", MISSING),
    ]
    return render(
        "headline",
        table=table("headline", "The papers’ claims, and this model", pd.DataFrame(rows, dtype=object)),
        tokens=sum(subject.lengths),
        small=subject.n_parameters < 1e8,
    )


def _row(measure: str, measurement: Measurement | None, column: str, papers: str) -> dict[str, str]:
    """Make a row: the mean of the column over heads and its range, and the mean of random weights."""
    random = MISSING
    if measurement is None:
        model = "not requested"
    elif measurement.refused:
        model = "not measured" if measurement.failed else "not for this model"
    elif column not in measurement.trained:
        model = "needs two texts"
    else:
        model = _mean_and_range(by_head(measurement.trained)[column])
        if measurement.random is not None:
            random = f"{number(measurement.random[column].mean())} ({count_copies(measurement.random)})"
    return {"measure": measure, "this model": model, "random": random, "the papers": papers}


def _mean_and_range(r: pd.Series) -> str:
    """Format the mean over heads, and the lowest and highest."""
    if r.isna().all():
        return "undefined: no head’s scores vary"
    return f"{number(r.mean())} ({number(r.min())} to {number(r.max())})" if len(r) > 1 else number(r.mean())
