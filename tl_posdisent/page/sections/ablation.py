"""The section ``ablation``: the loss added without each head."""

from __future__ import annotations

from markupsafe import Markup

from tl_posdisent.experiments.causal.head_ablation import head_ablation
from tl_posdisent.page.deciding.links import link_section
from tl_posdisent.page.deciding.words import number
from tl_posdisent.page.drawing.maps import head_map, with_attention
from tl_posdisent.page.drawing.markup import render, table
from tl_posdisent.page.measuring.heads_to_run import heads_to_run, sample_note, sample_size
from tl_posdisent.page.measuring.measurement import HEAD, Measurement, Settings, failures_note, join_notes
from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.page.sections.section import Content, Measured, Section
from tl_posdisent.utils.validation import head_label
from tl_posdisent.utils.words import plural
from tl_posdisent.viz.plots.heatmaps import bar_title, plot_heads

_POSITIONS, _TOKENS = 96, 384
"""Positions of each text, and tokens altogether, that are read."""
_LARGE_EFFECT = 0.01
"""Nats per token; the verdict counts heads above it."""
_LISTED = 8
"""Number of heads in the table of the largest effects."""


def _measure(subject: Subject, settings: Settings, _: Measured) -> Measurement:
    part = subject.cut(_POSITIONS, _TOKENS)
    heads, progress = heads_to_run(part), settings.progress
    table = head_ablation(part.reading, part.tokens, attention_mask=part.mask, heads=heads, progress=progress)
    note = join_notes(sample_note(part), failures_note(table))
    return Measurement(table, note=note, read=part, sample=sample_size(part))


def _passes(subject: Subject, settings: Settings) -> float:
    part = subject.cut(_POSITIONS, _TOKENS)
    return (1 + len(heads_to_run(part))) * sum(part.lengths)


def _show(subject: Subject, measurement: Measurement) -> Content:
    ablated = measurement.trained
    effects = with_attention(ablated[[*HEAD, "value", "effect"]], subject.attention)
    titles = {"value": "loss without it", "effect": "added loss"}
    caption = f"Largest added loss; the loss of the whole model is {ablated['baseline'].iloc[0]:.4f}"
    largest = effects.sort_values("effect", ascending=False, kind="stable").head(_LISTED)
    drawn = plot_heads(ablated, "effect", signed=True)
    drawn.update_traces(colorbar_title_text=bar_title("added loss (nats per token)"))
    values = {
        "map": head_map(drawn, "Added loss without the head", subject),
        "largest": table("ablation", caption, largest, titles, 4),
        "every": table("heads-ablation", "Every head", effects, titles, 4),
    }
    return Content(render("sections/ablation", **values))


def _sentences(measurement: Measurement) -> list[Markup]:
    effects = measurement.trained.dropna(subset="effect").sort_values("effect", ascending=False, kind="stable")
    largest, n_large = effects.iloc[0], int((effects["effect"] > _LARGE_EFFECT).sum())
    link = link_section(ABLATION.name, measurement)
    ablating = f"Among {measurement.sample} at equal steps, ablating" if measurement.sample else "Ablating"
    if not largest["effect"] > 0:
        return [Markup("{} a single head never raises the loss {}.").format(ablating, link)]
    others = ""
    if n_large > 1:
        heads = plural(len(effects), "head")
        others = f"; of {heads}, {n_large} raise it by more than {_LARGE_EFFECT} when ablated alone"
    label = head_label(int(largest["layer"]), int(largest["head"]))
    sentence = Markup("{} {} raises the loss most, by {} nats per token{} {}.")
    return [sentence.format(ablating, label, number(largest["effect"]), others, link)]


ABLATION = Section("ablation", "Head ablation", _measure, _passes, _show, _sentences)
