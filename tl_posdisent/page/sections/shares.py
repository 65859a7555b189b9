"""The section ``shares``: the variance decomposition of the scores at controlled distances."""

from __future__ import annotations

from markupsafe import Markup

from tl_posdisent.experiments.attention_scores.controlled_distance import controlled_distance
from tl_posdisent.page.deciding.against_random import compare_with_random
from tl_posdisent.page.drawing.maps import with_attention
from tl_posdisent.page.drawing.markup import figure, render, table
from tl_posdisent.page.measuring.measurement import HEAD, Measurement, Settings
from tl_posdisent.page.measuring.random_copies import measure_with_baseline
from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.page.sections.section import Content, Measured, Section
from tl_posdisent.rope.factorial_variance_decomposition import COMPONENTS
from tl_posdisent.viz.plots.bars import plot_shares

_BARS = 96
"""Maximum number of heads with a bar each; of more heads, means by layer are drawn."""
_CORRELATIONS = ["r_two_axis", "r_three_axis"]


def _measure(subject: Subject, settings: Settings, _: Measured) -> Measurement:
    return measure_with_baseline(controlled_distance, subject, settings)


def _passes(subject: Subject, settings: Settings) -> float:
    return (1 + settings.copies) * subject.n_run


def _show(subject: Subject, measurement: Measurement) -> Content:
    heads, random = measurement.trained, measurement.random
    components = sorted(COMPONENTS, key=lambda effect: "distance:" in effect)
    means = heads.groupby("layer", as_index=False)[[*_CORRELATIONS, *components]].mean()
    few = len(heads) <= _BARS
    caption = "Share of the variance of the scores of each head" if few else "Share of the variance, mean over heads"
    bars = figure(plot_shares(heads if few else means), caption, height=440)
    if random is not None:
        means.insert(2, "random r_two_axis", means["layer"].map(random.groupby("layer")["r_two_axis"].mean()))
    titles = {name: name.replace("_", " ").replace(":", " × ") for name in means.columns}
    of_heads = with_attention(heads[[*HEAD, *_CORRELATIONS, *components]], subject.attention)
    of_layers = with_attention(means, subject.attention)
    every = table("heads-shares", "Every head at controlled distances", of_heads, titles)
    by_layer = table("layers-shares", "By layer, mean over heads", of_layers, titles)
    return Content(render("sections/shares", bars=bars, by_layer=by_layer, every=every))


def _sentences(measurement: Measurement) -> list[Markup]:
    return compare_with_random(measurement, "r_two_axis", "the two-axis model", SHARES.name)


SHARES = Section("shares", "Variance decomposition of the scores", _measure, _passes, _show, _sentences)
