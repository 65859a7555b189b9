"""The section ``heads``: the most and the least additive head, as widgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float
from markupsafe import Markup
from torch import Tensor

from tl_posdisent.additive.fit import fit_additive
from tl_posdisent.additive.result import AdditiveFit
from tl_posdisent.models.capture import for_each_scores
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.page.deciding.words import number
from tl_posdisent.page.drawing.markup import render
from tl_posdisent.page.measuring.measurement import Measurement, Settings, by_head
from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.page.sections.additivity import ADDITIVITY, measure_additivity
from tl_posdisent.page.sections.section import Content, Measured, Section
from tl_posdisent.utils.validation import head_label
from tl_posdisent.viz.widgets.offline import Widget
from tl_posdisent.viz.widgets.score_matrices import show_parts, show_patterns
from tl_posdisent.viz.widgets.token_colours import show_key_importance

_SHOWN = 24
"""Number of tokens on the axes of a chart."""


@dataclass(frozen=True)
class Exhibits:
    """The most and the least additive head (layer, head), with the fits and scores of their layers."""

    most: tuple[int, int]
    least: tuple[int, int]
    fits: dict[int, AdditiveFit]
    scores: dict[int, Float[Tensor, "1 head query key"]]


def _measure(subject: Subject, settings: Settings, measured: Measured) -> Measurement:
    """Fit the first text in the layers of the two heads, by the table of the section ``additivity`` if it is there."""
    before = measured.get(ADDITIVITY.name)
    known = before is not None and before.refused is None
    most, least = _extreme_heads(before.trained if before and known else measure_additivity(subject))
    fits: dict[int, AdditiveFit] = {}
    scores_by_layer: dict[int, Tensor] = {}

    def fit_layer(spec: AttentionSpec, scores: Tensor) -> None:
        mask: Literal["causal", "full"] = "causal" if spec.causal else "full"
        fits[spec.layer] = fit_additive(scores, mask=mask, window=spec.window)
        scores_by_layer[spec.layer] = scores

    specs = subject.reading.specs(sorted({most[0], least[0]}))
    for_each_scores(subject.model, subject.first, specs, fit_layer)
    return Measurement(Exhibits(most, least, fits, scores_by_layer))


def _extreme_heads(additivity: pd.DataFrame) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return layer and head with the largest and with the smallest *r*, mean over texts."""
    heads = by_head(additivity).dropna(subset="r").sort_values("r", ascending=False, kind="stable")
    if heads.empty:
        raise ValueError("no head has scores that vary, so none is more additive than another")
    most, least = ((int(row["layer"]), int(row["head"])) for row in (heads.iloc[0], heads.iloc[-1]))
    return most, least


def _passes(subject: Subject, settings: Settings) -> float:
    return subject.lengths[0]


def _show(subject: Subject, measurement: Measurement) -> Content:
    """Render the widgets with their explanations."""
    exhibits: Exhibits = measurement.trained
    titles = {"Most additive": exhibits.most, "Least additive": exhibits.least}
    if exhibits.most == exhibits.least:
        titles.pop("Least additive")
    widgets: list[Widget] = []
    for head in titles.values():
        widgets += _score_widgets(subject, exhibits, head)
    widgets.append(_key_widget(subject, exhibits))
    drawn = [widget.element_and_script(f"widget-{place}") for place, widget in enumerate(widgets)]
    elements, scripts = [Markup(element) for element, _ in drawn], tuple(script for _, script in drawn)
    heads = [
        {"title": title, **_words(exhibits, head), "parts": parts, "patterns": patterns}
        for (title, head), parts, patterns in zip(titles.items(), elements[:-1:2], elements[1:-1:2], strict=True)
    ]
    values: dict[str, Any] = {"n": min(_SHOWN, subject.lengths[0]), "heads": heads, "keys": elements[-1]}
    return Content(render("sections/heads", **values), scripts)


def _words(exhibits: Exhibits, head: tuple[int, int]) -> dict[str, str]:
    """Return the label of a head, and its *r* in the first text."""
    layer, index = head
    return {"label": head_label(layer, index), "r": number(float(exhibits.fits[layer].r[0, index]))}


def _score_widgets(subject: Subject, exhibits: Exhibits, head: tuple[int, int]) -> list[Widget]:
    """Make the charts of one head: its scores with their components, and the softmax of scores and fit."""
    layer, index = head
    fit, scores, label = exhibits.fits[layer], exhibits.scores[layer], head_label(layer, index)
    pattern = scores.double().masked_fill(~fit.mask.to(scores.device), -torch.inf).softmax(-1)
    positions = range(min(_SHOWN, subject.lengths[0]))
    components, patterns = f"{label}: the scores and their components", f"{label}: softmax of scores and fit"
    return [
        show_parts(fit, subject.words, index, scores=scores, title=components, positions=positions),
        show_patterns(fit, subject.words, pattern, heads=[index], title=patterns, positions=positions),
    ]


def _key_widget(subject: Subject, exhibits: Exhibits) -> Widget:
    """Colour the text by the key components of both layers, that of the most additive head first."""
    fits = dict(sorted(exhibits.fits.items(), key=lambda layer_fit: layer_fit[0] != exhibits.most[0]))
    heads = sorted({head for layer in fits for head in subject.heads[layer]})
    positions = range(min(2 * _SHOWN, subject.lengths[0]))
    return show_key_importance(fits, subject.words, heads=heads, positions=positions)


EXHIBITS = Section("heads", "The most and the least additive head", _measure, _passes, _show)
