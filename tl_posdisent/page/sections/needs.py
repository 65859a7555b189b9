"""The section ``where_or_what``: what each head's contribution to the predictions needs, by intervention."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import plotly.graph_objects as go
from markupsafe import Markup

from tl_posdisent.experiments.needs.replacements import CONSTANTS
from tl_posdisent.experiments.needs.shares import NEGLIGIBLE
from tl_posdisent.experiments.needs.where_or_what import where_or_what
from tl_posdisent.page.deciding.needs import describe_copy, describe_model
from tl_posdisent.page.drawing.markup import figure, render
from tl_posdisent.page.measuring.measurement import Measurement, Settings
from tl_posdisent.page.measuring.random_copies import measure_copies
from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.page.sections.section import Content, Measured, Section
from tl_posdisent.viz.palette import GREY
from tl_posdisent.viz.plots.plane import plot_where_or_what

_POSITIONS, _TOKENS = 72, 576
"""Positions of each text, and tokens altogether, that are read."""
_DRAWS, _EXACT = 4, 6
"""Draws of labels of the estimates; heads of the largest contribution that are run."""
_HEIGHT, _LABELS = 560, 8
"""Height of the plane in pixels; heads of the largest contribution that are labelled in it."""


def _measure(subject: Subject, settings: Settings, _: Measured) -> Measurement:
    """Measure the model, and one random copy of its weights without runs of single heads."""
    part = _usable(subject)
    table = _measure_needs(part, settings, exact=_EXACT)
    one_copy = replace(settings, copies=min(1, settings.copies), progress=False)  # its bar would look like the model's
    random, note = measure_copies(lambda copy: _measure_needs(copy, one_copy, exact=0), part, one_copy)
    return Measurement(table, random, note=note, read=part)


def _usable(subject: Subject) -> Subject:
    """Cut the texts, the longest one to the length of the second: each half is measured with fits to the other."""
    part = subject.cut(_POSITIONS, _TOKENS)
    return part.cut(sorted(part.lengths)[-2:][0], _TOKENS)


def _measure_needs(subject: Subject, settings: Settings, *, exact: int) -> pd.DataFrame:
    return where_or_what(
        subject.reading,
        {"input_ids": subject.tokens, "attention_mask": subject.real},
        layers=subject.asked_layers,
        heads=subject.asked_heads,
        draws=_DRAWS,
        exact=exact,
        seed=settings.seed,
        progress=settings.progress,
    )


def _passes(subject: Subject, settings: Settings) -> float:
    """Count two fits, the changes under each replacement, gradients of the metric and of draws, and runs of heads."""
    n_replacements = 3 + len(CONSTANTS)  # mean output, distances alone, uniform attention, content alone
    estimates = 3 + n_replacements + 2 * (1 + _DRAWS)
    runs = min(_EXACT, len(subject.pairs)) * n_replacements
    return (estimates * (1 + min(1, settings.copies)) + runs) * sum(_usable(subject).lengths)


def _show(subject: Subject, measurement: Measurement) -> Content:
    drawn = plot_where_or_what(measurement.trained, labels=_LABELS)
    caption = (
        "What the contribution of each head needs: share that survives with distances alone, and content alone; a "
        "click on a head opens its panel"
    )
    if measurement.random is not None:
        _add_copy(drawn, measurement.random)
        caption += "; crosses: heads of a random copy of the weights"
    values = {
        "constants": ", ".join(map(str, CONSTANTS[:-1])) + f" or {CONSTANTS[-1]}",
        "negligible": f"{NEGLIGIBLE:g}",
        "n_exact": int(measurement.trained["exact"].sum()),
        "plane": figure(drawn, caption, height=_HEIGHT, linked=True),
    }
    return Content(render("sections/where_or_what", **values))


def _add_copy(drawn: go.Figure, random: pd.DataFrame) -> None:
    """Draw the heads of a random copy as grey crosses, behind those of the model."""
    used = random[random["verdict"] != "not used"]
    marker = {"symbol": "x-thin", "size": 6, "line": {"color": GREY, "width": 1}}
    crosses = go.Scatter(
        x=used["where"], y=used["what"], mode="markers", name="random copy", marker=marker, hoverinfo="skip"
    )
    drawn.add_trace(crosses)
    drawn.data = (drawn.data[-1], *drawn.data[:-1])


def _sentences(measurement: Measurement) -> list[Markup]:
    answer = describe_model(measurement.trained, measurement, NEEDS.name)
    return [answer if measurement.random is None else answer + " " + describe_copy(measurement.random)]


NEEDS = Section("where_or_what", "Where or what", _measure, _passes, _show, _sentences)
