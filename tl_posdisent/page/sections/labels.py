"""The section ``labels``: what heads attend to, and the label of each."""

from __future__ import annotations

from markupsafe import Markup

from tl_posdisent.experiments.attention_scores.head_labels import N_SEQUENCES, SEQUENCE_TOKENS, head_labels
from tl_posdisent.page.deciding.links import link_section
from tl_posdisent.page.deciding.words import NO_LABEL, counted, label_words
from tl_posdisent.page.drawing.maps import with_attention
from tl_posdisent.page.drawing.markup import render, table
from tl_posdisent.page.measuring.measurement import Measurement, Settings, failures_note
from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.page.sections.section import Content, Measured, Section
from tl_posdisent.utils.words import plural

_POSITIONS, _TOKENS = 512, 1024
"""Positions of each text, and tokens altogether, that are read."""


def _measure(subject: Subject, settings: Settings, _: Measured) -> Measurement:
    """Label heads, with the mean over random copies beside each measure; ``head_labels`` makes these copies itself."""
    part = subject.cut(_POSITIONS, _TOKENS)
    table = head_labels(
        part.reading,
        part.tokens,
        attention_mask=part.mask,
        layers=part.asked_layers,
        heads=part.asked_heads,
        seed=settings.seed,
        seeds=settings.copy_seeds,
        std=settings.std,
        progress=False,
    )
    return Measurement(table, note=failures_note(table), read=part)


def _passes(subject: Subject, settings: Settings) -> float:
    part, repeated = subject.cut(_POSITIONS, _TOKENS), N_SEQUENCES * (1 + 2 * SEQUENCE_TOKENS)
    return (1 + settings.copies) * (part.n_run + repeated * subject.depth)


def _show(subject: Subject, measurement: Measurement) -> Content:
    """List the heads, those with a label first."""
    labels = label_words(measurement.trained).fillna({"label": NO_LABEL})
    rows = labels.sort_values("label", key=lambda label: label == NO_LABEL, kind="stable")
    every = table("heads-labels", "Every head", with_attention(rows, subject.attention))
    return Content(render("sections/labels", every=every))


def _sentences(measurement: Measurement) -> list[Markup]:
    labels = label_words(measurement.trained)["label"]
    if labels.isna().all():
        return []
    counts = labels.str.split(" + ", regex=False).explode().value_counts()
    kinds = counted(counts.to_dict())
    if counts.sum() > labels.notna().sum():
        kinds += Markup("; a head can have several")
    sentence = Markup("{} of {} have a label, by the keys that they attend to: {} {}.")
    heads = plural(len(labels), "head")
    return [sentence.format(labels.notna().sum(), heads, kinds, link_section(LABELS.name, measurement))]


LABELS = Section("labels", "Head labels", _measure, _passes, _show, _sentences)
