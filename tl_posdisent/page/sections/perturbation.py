"""The section ``perturbation``: the loss added by exchanged tokens, positions and phases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import pandas as pd
from markupsafe import Markup

from tl_posdisent.experiments.robustness.perturb import Kind
from tl_posdisent.experiments.robustness.perturbation_curve import lower_and_higher, perturbation_curve
from tl_posdisent.page.deciding.links import link_section
from tl_posdisent.page.deciding.words import signed
from tl_posdisent.page.drawing.markup import figure, render, table
from tl_posdisent.page.measuring.measurement import Measurement, Settings, failures_note, join_notes
from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.page.sections.section import Content, Measured, Section
from tl_posdisent.viz.plots.curves import plot_perturbation

_POSITIONS, _TOKENS = 512, 512
"""Positions of each text, and tokens altogether, that are read."""
FRACTIONS, PERTURBATIONS = (0, 0.05, 0.2, 0.5), 2
"""Fractions of each text that are perturbed, each so many times: twice, so both draws are shown, and no interval."""
_TOLERATED = 0.05
"""The fraction of tokens that may be out of place according to [A]."""
_KINDS = {"order": "order of the text", "index": "positions that RoPE receives", "feature": "phases of RoPE"}
_EXCHANGED = {"order": "tokens of the text", "index": "positions", "feature": "phases of RoPE"}


def _measure(subject: Subject, settings: Settings, _: Measured) -> Measurement:
    """Perturb order, positions and phases; of a model without RoPE, the order of the text only."""
    part = subject.cut(_POSITIONS, _TOKENS)
    try:
        curve, note = _perturb(part, settings, get_args(Kind)), None
    except ValueError as error:
        curve, note = _perturb(part, settings, ["order"]), f"Only the order of the text: {error}."
    return Measurement(curve, note=join_notes(note, failures_note(curve)), read=part)


def _perturb(subject: Subject, settings: Settings, kinds: Sequence[Kind]) -> pd.DataFrame:
    return perturbation_curve(
        subject.reading,
        subject.tokens,
        attention_mask=subject.mask,
        kinds=kinds,
        fractions=FRACTIONS,
        seeds=range(settings.seed, settings.seed + PERTURBATIONS),
        progress=False,
    )


def _passes(subject: Subject, settings: Settings) -> float:
    perturbed = len(get_args(Kind)) * (len(FRACTIONS) - 1) * PERTURBATIONS
    return (1 + perturbed) * sum(subject.cut(_POSITIONS, _TOKENS).lengths)


def _show(subject: Subject, measurement: Measurement) -> Content:
    curve = measurement.trained
    drawn = plot_perturbation(curve.assign(kind=curve["kind"].map(_KINDS)))
    lower, higher = lower_and_higher(curve)
    columns = ["kind", "fraction", "moved", "added_loss", "lower", "higher", "kl", "perplexity", "accuracy"]
    rows = curve.assign(lower=lower, higher=higher)[columns]
    titles = {"moved": "tokens moved", "lower": "lower of the draws", "higher": "higher of the draws"}
    titles |= {"kl": "KL", "fraction": "fraction asked for"}
    digits = {"fraction": 2, "added_loss": 4, "lower": 4, "higher": 4, "kl": 4, "perplexity": 1}
    caption = f"Added loss by perturbed fraction: mean of {PERTURBATIONS} draws of the pairs (line), and each of them"
    means = table("perturbation", f"Mean of {PERTURBATIONS} draws of the pairs", rows, titles, digits)
    return Content(render("sections/perturbation", curves=figure(drawn, caption), table=means))


def _sentences(measurement: Measurement) -> list[Markup]:
    curve = measurement.trained
    rows = curve[curve["fraction"] == _TOLERATED]
    if rows.empty or not rows["moved"].any():
        return []
    changes, rows = [], rows.dropna(subset="added_loss")
    for kind, mean, *draws in zip(rows["kind"], rows["added_loss"], *lower_and_higher(rows), strict=True):
        known = [x for x in draws if not pd.isna(x)] or [mean]  # a draw in which no position kept its place is NaN
        changes.append(f"{_EXCHANGED[kind]} {' and '.join(map(signed, known))}")
    sentence = Markup(
        "Exchanging 5 % of neighbours changes the loss at the other tokens, in nats per token, in {} draws of the "
        "pairs: {} {}."
    )
    return [sentence.format(PERTURBATIONS, "; ".join(changes), link_section(PERTURBATION.name, measurement))]


PERTURBATION = Section(
    "perturbation", "Robustness to perturbed word order and positions", _measure, _passes, _show, _sentences
)
