"""Sections on distance profiles, variance decomposition at controlled distances, and rotary subspaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from tl_posdisent.rope.variance_decomposition import EFFECTS

from .markup import folded, paragraph, table
from .measurements import HEAD, Found
from .subject import Subject
from .svg_charts import Line, legend, line_chart, stacked_bars
from .svg_heatmaps import colour_bar, figure, heat_map

_LINES = 8  # heads in one picture
_BARS = 96


def distance(subject: Subject, found: Found) -> str:
    """Distance profiles: pictures of some layers and heads, numbers at some distances."""
    profiles, shown = found.trained, found.trained["layer"].unique().tolist()
    left = "" if len(shown) == len(subject.layers) else f" Of {len(subject.layers)} layers, {len(shown)} are shown."
    heads = sorted(profiles["head"].unique().tolist())
    few = len(heads) <= _LINES
    if not few:
        left += f" Of each layer, the {_LINES} heads whose distance part varies most are drawn."
    said = paragraph(
        "The distance part of the scores, fitted to all texts together. A decreasing line is a head that prefers "
        "near keys; the scores of a head with a flat line do not depend on the distance alone. A score higher by "
        "0.69 doubles a key’s weight. Beyond 16, means of neighbouring distances are drawn; few pairs are far apart, "
        "so the right ends are noisy." + left
    )
    pictures = ""
    causal = bool((profiles["distance"] >= 0).all())
    ticks = _distance_ticks(profiles["distance"])
    for layer, rows in profiles.groupby("layer"):
        lines_of = heads if few else _most_varied(rows)
        lines = {f"head {head}": _binned(rows[rows["head"] == head]) for head in lines_of}
        drawn = line_chart(
            lines,
            label=f"Distance part of the scores of layer {layer}, a line for each head",
            x_name="distance (tokens)",
            y_name="score",
            ticks=ticks,
            logarithmic=causal,
        )
        pictures += figure(drawn + ("" if few else legend(list(lines), lines=True)), f"layer {layer}")
    at = profiles[profiles["distance"].isin(ticks)].groupby(["layer", "distance"])["value"].mean().unstack("distance")
    at = at.rename(columns=lambda d: f"d = {d}").reset_index()
    numbers_of = table("distance", "Distance part of the scores, mean over all heads of a layer", at)
    return (
        said
        + f'<div class="grid">{pictures}</div>'
        + (legend([f"head {head}" for head in heads], lines=True) if few else "")
        + folded("Numbers at some distances", numbers_of)
    )


def _most_varied(rows: pd.DataFrame) -> list[int]:
    """The heads whose distance part varies most over the cells of the scores, the largest first."""
    squares = (rows["value"] ** 2 * rows["cells"]).groupby(rows["head"]).sum()
    return [int(head) for head in squares.nlargest(_LINES).index]


def _distance_ticks(distances: Any) -> list[int]:
    low, high = int(distances.min()), int(distances.max())
    doubled = [0, *(2**n for n in range(high.bit_length()))]
    positive = [d for d in doubled if d <= high]
    if low >= 0:
        return positive
    quarter = max(1, high // 4)
    return [d for d in range(-4 * quarter, 4 * quarter + 1, quarter) if low <= d <= high]


def _binned(rows: pd.DataFrame) -> Line:
    """Distances up to 16 one by one, beyond that means over an eighth of an octave, weighted by their cells."""
    d = rows["distance"].abs().clip(lower=1)
    octave = np.where(d <= 16, d, 16 + np.floor(8 * np.log2(d / 16)))
    bins = np.sign(rows["distance"]) * octave
    summed = rows.assign(value=rows["value"] * rows["cells"], distance=rows["distance"] * rows["cells"]).groupby(bins)
    totals = summed[["distance", "value", "cells"]].sum()
    return (totals["distance"] / totals["cells"]).tolist(), (totals["value"] / totals["cells"]).tolist()


def shares(subject: Subject, found: Found) -> str:
    """The variance at controlled distances, head by head; layer by layer where there are many."""
    rows, unit = found.trained, HEAD
    if len(rows) > _BARS:
        rows, unit = rows.drop(columns="head").groupby("layer", as_index=False).mean(), ["layer"]
    order = sorted(EFFECTS, key=lambda effect: "distance:" in effect)
    names = [effect.replace(":", " × ") for effect in order]
    layers = [f"layer {x}" for x in rows["layer"]]
    bars, groups = (
        ([str(x) for x in rows["head"]], layers)
        if "head" in rows
        else ([str(x) for x in rows["layer"]], [""] * len(rows))
    )
    parts = {name: rows[effect].tolist() for name, effect in zip(names, order, strict=True)}
    label = "Stacked bars: shares of the variance of the scores, for each head"
    drawn = stacked_bars(bars, parts, groups, label=label, x_name="head" if "head" in rows else "layer")
    means = found.trained.groupby("layer", as_index=False)[["r_two_axis", "r_three_axis", *order]].mean()
    if found.random is not None:
        chance = found.random.groupby("layer")["r_two_axis"].mean()
        means.insert(2, "random r_two_axis", means["layer"].map(chance))
    said = paragraph(
        "At controlled distances every query meets every key at every distance, so that position and content are not "
        "confounded. A bar is the variance of one head’s scores: main effects of distance, query and key, and their "
        "interactions. The interactions with the distance, on top, are the part that is not additive. The two-axis "
        "<em>r</em> is that of a function of query and distance plus a function of query and key."
    )
    titles = {name: name.replace("_", " ").replace(":", " × ") for name in means.columns}
    every = table(
        "heads-shares",
        "Every head at controlled distances",
        found.trained[[*HEAD, "r_two_axis", "r_three_axis", *order]],
        titles,
        index=2,
    )
    return (
        said
        + figure(drawn, "share of the variance" + ("" if unit == HEAD else ", mean over heads"))
        + legend(names, lines=False)
        + table("layers-shares", "By layer, mean over heads", means, titles)
        + folded("The numbers of every head", every)
    )


def subspaces(subject: Subject, found: Found) -> str:
    """Shares and concentrations by wavelength."""
    parts = ["distance", "semantic", "interaction"]
    columns = ["wavelength", "turn", "key_concentration", *parts]
    means = found.trained.groupby("subspace", as_index=False)[columns].mean()
    if found.random is not None:
        chance = found.random.groupby("subspace")["key_concentration"].mean()
        means.insert(4, "random key_concentration", means["subspace"].map(chance))
    waves = ["∞" if not np.isfinite(w) else f"{w:.0f}" for w in means["wavelength"]]
    drawn = stacked_bars(
        waves,
        {part: means[part].tolist() for part in parts},
        [""] * len(means),
        label="Stacked bars: contribution of each subspace to the variance of the scores",
        x_name="wavelength (positions)",
    )
    grid = found.trained.pivot_table(index="subspace", columns="layer", values="key_concentration")
    several = (found.trained.groupby("subspace")["frequency"].agg(np.ptp) > 1e-6).any()
    heat = heat_map(
        grid,
        label="Heat map: concentration of keys by wavelength and layer",
        rows="subspace" if several else "wavelength",
        columns="layer",
        low=0,
        high=1,
        names=None if several else waves,
    )
    said = paragraph(
        "RoPE rotates each head’s coordinates in pairs (subspaces), from fast to slow. A subspace in which all keys "
        "have the same direction (<em>concentration</em> near 1) carries position but no content; one that hardly "
        "rotates over the text (<em>turn</em> near 0) carries content but no position. In other subspaces position "
        "and content interact."
    )
    titles = {"key_concentration": "concentration of keys", "random key_concentration": "random concentration"}
    return (
        said
        + '<div class="pair">'
        + figure(drawn + legend(parts, lines=False), "contribution to the variance, mean over heads")
        + figure(heat, f"concentration of keys, mean over heads {colour_bar('0', '1')}")
        + "</div>"
        + table("subspaces", "By subspace, mean over heads and layers", means, titles, {"wavelength": 1})
    )
