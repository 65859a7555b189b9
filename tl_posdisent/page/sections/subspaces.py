"""The section ``subspaces``: the contribution of each rotary wavelength to the scores."""

from __future__ import annotations

from math import isnan

import pandas as pd
from markupsafe import Markup

from tl_posdisent.experiments.attention_scores.subspace_patterns import subspace_patterns
from tl_posdisent.page.deciding.words import numbers
from tl_posdisent.page.drawing.markup import figure, part, render, table
from tl_posdisent.page.measuring.measurement import Measurement, Settings
from tl_posdisent.page.measuring.random_copies import measure_with_baseline
from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.page.sections.section import Content, Measured, Section
from tl_posdisent.viz.plots.bars import stacked_shares
from tl_posdisent.viz.plots.heatmaps import plot_subspaces, wavelengths

_LISTED = 16
"""Longer tables of subspaces are folded."""


def _measure(subject: Subject, settings: Settings, _: Measured) -> Measurement:
    return measure_with_baseline(subspace_patterns, subject, settings)


def _passes(subject: Subject, settings: Settings) -> float:
    return (1 + settings.copies) * subject.n_run


def _show(subject: Subject, measurement: Measurement) -> Content:
    """Average over the layers of each rotary base: only they have the same wavelengths."""
    groups = layers_by_frequencies(subject)
    figures, tables = list[Markup](), list[Markup]()
    for group, (base, layers) in enumerate(groups.items()):
        named = f"layers {numbers(layers)} ({base})" if len(groups) > 1 else ""
        trained, random = measurement.trained, measurement.random
        trained = trained[trained["layer"].isin(layers)]
        random = None if random is None else random[random["layer"].isin(layers)]
        means = _means_by_subspace(trained, random)
        figures += _figures(trained, means, named)
        tables.append(_foldable_table("subspaces" if group == 0 else f"subspaces-{group + 1}", means, named))
    return Content(render("sections/subspaces", figures=figures, tables=tables, bases=list(groups)))


def layers_by_frequencies(subject: Subject) -> dict[str, list[int]]:
    """Group the layers with rotary embeddings by their frequencies; the names are unique."""
    groups: dict[tuple[float, ...], tuple[str, list[int]]] = {}
    for spec in subject.specs:
        if spec.rotary is None:
            continue
        waves = spec.rotary.wavelengths
        ends = f"wavelengths from {float(waves.min()):.4g} to {float(waves.max()):.6g}" if len(waves) else "no rotation"
        name = ends if isnan(spec.rotary.base) else f"base {spec.rotary.base:.6g}"
        groups.setdefault(tuple(spec.rotary.frequencies.tolist()), (name, []))[1].append(spec.layer)
    names = [name for name, _ in groups.values()]
    return {
        name if names.count(name) == 1 else f"{name}, from layer {layers[0]}": layers
        for name, layers in groups.values()
    }


_COMPONENTS = ["distance", "semantic", "interaction"]


def _means_by_subspace(trained: pd.DataFrame, random: pd.DataFrame | None) -> pd.DataFrame:
    """Average over layers and heads."""
    columns = ["wavelength", "turn", *_COMPONENTS, "key_concentration"]
    means = trained.groupby("subspace", as_index=False)[columns].mean()
    if random is not None:
        concentration = random.groupby("subspace")["key_concentration"].mean()
        means["random key_concentration"] = means["subspace"].map(concentration)
    return means


def _figures(trained: pd.DataFrame, means: pd.DataFrame, layers: str) -> list[Markup]:
    """Draw means over heads of layers with the same frequencies."""
    bars = stacked_shares(wavelengths(trained), means, _COMPONENTS)
    bars.update_xaxes(title="wavelength (positions)", type="category")
    by_layer = trained.groupby(["layer", "subspace"], as_index=False)[["frequency", "key_concentration"]].mean()
    where = f", {layers}" if layers else ""
    return [
        figure(bars, f"Contribution to the variance of the scores, mean over heads{where}", height=440),
        figure(plot_subspaces(by_layer), f"Concentration of keys, mean over heads{where}", height=440),
    ]


def _foldable_table(name: str, means: pd.DataFrame, layers: str) -> Markup:
    """Render the table of subspaces, folded if it is long."""
    titles = {"key_concentration": "concentration of keys", "random key_concentration": "random concentration"}
    caption = f"By subspace, mean over heads and {layers or 'layers'}"
    content = table(name, caption, means, titles, {"wavelength": 1})
    if len(means) <= _LISTED:
        return content
    return part("folded", f"The {len(means)} subspaces{f' of {layers}' if layers else ''}", content)


SUBSPACES = Section("subspaces", "Rotary subspaces", _measure, _passes, _show)
