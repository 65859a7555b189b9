"""Figures draw the numbers of their tables, where and as they should, and leave everything else alone."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import plotly.io as pio
import pytest
import torch

from tl_posdisent import (
    fit_additive,
    plot_distance,
    plot_heads,
    plot_shares,
)
from tl_posdisent.rope import COMPONENTS
from tl_posdisent.utils.validation import head_label
from tl_posdisent.viz import (
    plot_length,
    plot_perturbation,
    plot_subspaces,
    plot_verdicts,
    plot_where_or_what,
)
from tl_posdisent.viz.palette import (
    DIVERGING,
    GREY,
    NEEDS,
    NEGATIVE,
    POSITIVE,
    VERDICTS,
    ZERO,
    faint,
    on_scale,
    rgb,
)

NAN = float("nan")


def by_head(layers: int, heads: int, **columns: Any) -> pd.DataFrame:
    """One row per layer and head, in disorder, with columns computed of both."""
    rows = [(layer, head) for layer in range(layers) for head in range(heads)]
    table = pd.DataFrame(rows, columns=["layer", "head"])
    for name, f in columns.items():
        table[name] = [float(f(layer, head)) for layer, head in rows]
    return table.sample(frac=1, random_state=0, ignore_index=True)


HEADS = by_head(3, 2, r=lambda layer, head: 10 * layer + head, effect=lambda layer, head: layer - 1 + head / 10)
SHARES = by_head(2, 3, **{e: lambda layer, head, n=n: (n + layer) / (21 + 7 * layer) for n, e in enumerate(COMPONENTS)})
SUBSPACES = pd.concat(
    [
        HEADS.assign(subspace=c, frequency=2 * np.pi / 10.0**c, key_size=HEADS["r"] + 100 * c, distance=HEADS["effect"])
        for c in (2, 0, 1)
    ]
)
ONE_LAYER = SUBSPACES.query("layer == 1").drop(columns="layer")
PERTURBATION = pd.DataFrame(
    [("order", 0.5, 0.3, 0.1), ("order", 0.0, 0.0, 0.0), ("order", 1.0, NAN, NAN), ("index", 0.1, 0.2, NAN)],
    columns=["kind", "fraction", "added_loss", "added_loss_se"],
)
LENGTH = pd.DataFrame({"start": [100, 0], "stop": [300, 100], "loss": [5.0, 3.0], "entropy": [2.0, 1.0]})
PROFILES = by_head(2, 2).merge(pd.DataFrame({"distance": [3, 0, 1, 2]}), how="cross")
PROFILES = PROFILES.assign(value=PROFILES["layer"] * 100.0 + PROFILES["head"] * 10 + PROFILES["distance"])

HEAD_VERDICTS = by_head(2, 3).assign(gap=[0.1, 0.2, 0.3, 0.4, 0.5, 0.0], error=0.01)
HEAD_VERDICTS["verdict"] = ["static", "distance", "more than additive", "undecided", "static", "no effect"]
HEAD_VERDICTS["between"] = ["", "", "", "static and additive", "", ""]

PLANE = by_head(2, 3).sort_values(["layer", "head"], ignore_index=True)
PLANE["verdict"] = ["where", "undecided", "what", "mixed", "not used", "where"]
PLANE["where_part"], PLANE["what_part"] = [0.9, 0.5, 0.0, 0.4, NAN, 0.8], [0.1, 0.4, 1.0, 0.5, NAN, 0.0]
PLANE["neither_part"] = 1 - PLANE["where_part"] - PLANE["what_part"]
PLANE["joint"] = [0.0, 0.31, 0.3, 0.7, NAN, -0.2]
PLANE["contribution"] = [0.04, 0.01, 0.16, 0.02, 0.0, 0.09]
PLANE_COLUMNS = ["layer", "head", "verdict", "where_part", "what_part", "neither_part", "contribution"]

PLOTS: list[tuple[Callable[..., go.Figure], pd.DataFrame, list[str]]] = [
    (partial(plot_heads, value="r"), HEADS, ["layer", "head", "r"]),
    (plot_distance, PROFILES, ["distance", "value"]),
    (plot_shares, SHARES.query("layer == 1").drop(columns="layer"), ["head", *COMPONENTS]),
    (partial(plot_subspaces, value="key_size"), ONE_LAYER, ["head", "subspace", "frequency", "key_size"]),
    (plot_perturbation, PERTURBATION, ["kind", "fraction", "added_loss"]),
    (partial(plot_length, measures=["loss"]), LENGTH, ["start", "stop", "loss"]),
    (plot_verdicts, HEAD_VERDICTS, ["layer", "head", "verdict", "gap"]),
    (plot_where_or_what, PLANE, PLANE_COLUMNS),
]
NAMES = ["heads", "distance", "shares", "subspaces", "perturbation", "length", "verdicts", "plane"]


# --- what holds for all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("plot", "table", "columns"), PLOTS, ids=NAMES)
def test_every_axis_says_what_it_is_and_nothing_else_changes(plot: Any, table: pd.DataFrame, columns: Any) -> None:
    template, before = pio.templates.default, pio.templates[pio.templates.default].to_plotly_json()
    same = table.copy(deep=True)
    figure = plot(table)
    assert isinstance(figure, go.Figure)
    axes = [*figure.select_yaxes(), list(figure.select_xaxes())[-1]]  # panels share the last x axis
    assert all(axis.title.text for axis in axes)
    pd.testing.assert_frame_equal(table, same)
    assert pio.templates.default == template
    assert pio.templates[template].to_plotly_json() == before
    assert figure.layout.template == go.Figure().layout.template  # the user's own


@pytest.mark.parametrize(("plot", "table", "columns"), PLOTS, ids=NAMES)
@pytest.mark.usefixtures("unchecked")
def test_refusals(plot: Any, table: pd.DataFrame, columns: list[str]) -> None:
    for column in columns:
        with pytest.raises(
            ValueError, match=rf"columns {', '.join(columns)}, as from \w.*got a table without {column}$"
        ):
            plot(table.drop(columns=column))
    with pytest.raises(ValueError, match="must have rows"):
        plot(table[:0])
    number = columns[-1]
    words = table.astype({number: object}).assign(**{number: "many"})
    with pytest.raises(ValueError, match=f"column {number} must be numbers"):
        plot(words)


@pytest.mark.parametrize("n", [0, 2, 3])
def test_rows_that_are_no_texts_are_not_averaged(n: int) -> None:
    plot, table, _ = PLOTS[n]
    with pytest.raises(ValueError, match=r"one row for each .*got several: select rows first"):
        plot(pd.concat([table, table]))
    texts = pd.concat([table.assign(batch=0), table.assign(batch=1)])
    assert plot(texts).to_dict()["data"] == plot(table).to_dict()["data"]
    with pytest.raises(ValueError, match=r"one row for each .*batch, got several"):
        plot(pd.concat([texts, texts]))


# --- one by one -------------------------------------------------------------------------------------------------


def test_heads_has_layers_on_y_from_the_top_and_heads_on_x() -> None:
    figure = plot_heads(HEADS, "r")
    (heat,) = figure.data
    assert np.array_equal(heat.z, [[0, 1], [10, 11], [20, 21]])
    assert (list(heat.y), list(heat.x)) == (["0", "1", "2"], ["0", "1"])
    assert figure.layout.yaxis.autorange == "reversed"
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("head", "layer")
    assert (heat.zmin, heat.zmax) == (0, 21)


def test_heads_takes_the_mean_over_texts_and_leaves_blank_what_is_unknown() -> None:
    other = HEADS.assign(batch=1, r=HEADS["r"] + 4)
    table = pd.concat([HEADS.assign(batch=0), other])
    table.loc[(table["layer"] == 1) & (table["head"] == 0), "r"] = NAN
    (heat,) = plot_heads(table, "r").data
    np.testing.assert_array_equal(heat.z, [[2, 3], [NAN, 13], [22, 23]])
    (heat,) = plot_heads(HEADS[HEADS.index != HEADS.query("layer == 2 and head == 1").index[0]], "r").data
    assert np.isnan(heat.z[2][1])


def test_colours_are_symmetric_where_numbers_are_signed() -> None:
    (heat,) = plot_heads(HEADS, "effect").data
    assert (heat.zmin, heat.zmax) == (-1.1, 1.1)
    middle = [colour for at, colour in heat.colorscale if at == 0.5]
    assert middle == [ZERO]
    assert (heat.colorscale[0][1], heat.colorscale[-1][1]) == (NEGATIVE, POSITIVE)  # blue below 0
    (forced,) = plot_heads(HEADS, "r", signed=True).data
    assert (forced.zmin, forced.zmax) == (-21, 21)
    (plain,) = plot_heads(HEADS, "effect", signed=False).data
    assert (plain.zmin, plain.zmax) == (-1, 1.1)
    assert plain.colorscale != heat.colorscale
    (given,) = plot_heads(HEADS, "r", limits=(-5, 50)).data
    assert (given.zmin, given.zmax) == (-5, 50)
    (least,) = plot_heads(HEADS.assign(r=HEADS["r"] + 3), "r").data
    assert (least.zmin, least.zmax) == (3, 24)
    (zero,) = plot_heads(HEADS.assign(r=0.0), "r").data
    assert zero.zmin < zero.zmax


@pytest.mark.parametrize("limits", [(-1, 5), (-5, 1), (-0.5, 0.5), (1, 3), (-3, -2)])
def test_zero_is_white_and_one_number_has_one_colour_whatever_the_limits(limits: tuple[float, float]) -> None:
    """A number has the colour that symmetric limits of the same size give it."""
    (heat,) = plot_heads(HEADS, "effect", limits=limits).data
    most = max(map(abs, limits))
    for number in np.linspace(*limits, 41):
        found, expected = (
            rgb(on_scale(scale, (number - low) / (high - low)))
            for scale, (low, high) in ((heat.colorscale, limits), (DIVERGING, (-most, most)))
        )
        assert np.abs(np.subtract(found, expected)).max() <= 1  # rounding of the ends


def test_by_layer_means_over_heads_and_their_range() -> None:
    low, high, line = plot_heads(pd.concat([HEADS.assign(batch=n) for n in (0, 1)]), "r", by="layer").data
    assert line.x.tolist() == [0, 1, 2]
    assert (low.y.tolist(), line.y.tolist(), high.y.tolist()) == ([0, 10, 20], [0.5, 10.5, 20.5], [1, 11, 21])
    assert line.customdata.tolist() == [[0, 1], [10, 11], [20, 21]]
    with pytest.raises(ValueError, match="limits must be two ascending numbers"):
        plot_heads(HEADS, "r", by="layer", limits=(1, 0))


def test_subspaces_has_wavelengths_on_y_and_heads_on_x() -> None:
    figure = plot_subspaces(SUBSPACES, "key_size")
    (heat,) = figure.data
    r = np.array([0, 1, 10, 11, 20, 21])
    assert np.array_equal(heat.z, [r, 100 + r, 200 + r])
    assert [list(x) for x in heat.x] == [["layer 0"] * 2 + ["layer 1"] * 2 + ["layer 2"] * 2, ["0", "1"] * 3]
    assert list(figure.layout.yaxis.ticktext) == ["1", "10", "100"]
    assert figure.layout.yaxis.autorange == "reversed"
    assert list(heat.customdata[2][3]) == ["layer 1, head 1", "100"]
    (signed,) = plot_subspaces(SUBSPACES, "distance").data
    assert (signed.zmin, signed.zmax) == (-1.1, 1.1)


def test_shares_are_stacked_to_one_with_what_breaks_additivity_on_top() -> None:
    figure = plot_shares(SHARES)
    ordered = SHARES.sort_values(["layer", "head"])
    for bar in figure.data:
        assert np.array_equal(bar.y, ordered[bar.name.replace(" × ", ":")])
        assert [list(x) for x in bar.x] == [["layer 0"] * 3 + ["layer 1"] * 3, ["0", "1", "2"] * 2]
    assert np.allclose(sum(np.array(bar.y) for bar in figure.data), 1)
    assert figure.layout.barmode == "relative"
    names = [bar.name for bar in figure.data]
    assert sorted(names) == sorted(effect.replace(":", " × ") for effect in COMPONENTS)
    assert [name.startswith("distance ×") for name in names] == [False] * 4 + [True] * 3
    assert len({bar.marker.color for bar in figure.data}) == 7


@pytest.mark.usefixtures("unchecked")
def test_tables_of_another_kind() -> None:
    with pytest.raises(ValueError, match="table must name layer and head in every row"):
        plot_heads(HEADS.assign(head=[pd.NA, *HEADS["head"][1:]]), "effect")
    with pytest.raises(ValueError, match="measures must be a sequence of columns, got 'loss'"):
        plot_length(LENGTH, "loss")
    with pytest.raises(ValueError, match="one row per bucket"):
        plot_length(LENGTH.assign(layer=0), ["loss"])


def test_distance_draws_each_profile_of_a_fit() -> None:
    scores = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    fit = fit_additive(scores)
    lines = plot_distance(fit).data
    assert [line.name for line in lines] == ["head 0", "head 1", "head 2"]
    for head, line in enumerate(lines):
        assert np.array_equal(line.y, fit.distance[0, head].numpy())
        assert np.array_equal(line.x, 1 + np.arange(12))  # so that a logarithmic axis shows 0
        assert np.array_equal(line.customdata, np.arange(12))
    (alone,) = plot_distance(fit_additive(scores[0, 1])).data
    assert np.allclose(alone.y, lines[1].y)
    two = plot_distance(fit_additive(torch.cat([scores, -scores])))
    assert np.allclose(two.data[0].y, 0)  # the mean over texts


@pytest.mark.parametrize("least", [0, -400])
def test_far_distances_are_averaged_by_their_cells_and_near_ones_are_not(least: int) -> None:
    distance = np.arange(least, 500)
    table = pd.DataFrame({"distance": distance, "cells": 500.0 - abs(distance)})
    table["value"] = np.random.default_rng(0).normal(size=len(table))
    (line,) = plot_distance(table, log=False).data
    near = abs(line.x) <= 32
    assert np.array_equal(line.y[near], table.loc[abs(distance) <= 32, "value"])
    far = table[table["distance"] > 32]
    octave = np.floor(8 * np.log2(far["distance"] / 32)).astype(int)
    for n, (_, rows) in enumerate(far.groupby(octave)):
        at = near.sum() + n + (line.x < -32).sum()
        assert np.isclose(line.x[at], np.average(rows["distance"], weights=rows["cells"]))
        assert np.isclose(line.y[at], np.average(rows["value"], weights=rows["cells"]))
    assert len(line.x) - near.sum() == octave.nunique() + (30 if least else 0)


def test_the_most_positional_heads_of_several_layers_are_found_in_a_fit() -> None:
    point = torch.arange(12.0)[:, None] - torch.arange(12.0)
    noise = torch.randn(1, 2, 2, 12, 12, generator=torch.Generator().manual_seed(0))
    noise[0, 1, 0] += 3 * point
    fit = dataclasses.replace(fit_additive(noise), layers=(4, 7))
    assert plot_distance(fit, top=1).data[-1].name == "layer 7, head 0"


def test_distance_colours_the_most_positional_heads_and_says_which() -> None:
    steep = {(0, 1): 3.0, (2, 0): -7.0, (1, 1): 5.0}  # a falling profile is as positional as a rising one
    table = by_head(3, 2).merge(pd.DataFrame({"distance": range(20)}), how="cross")
    slopes = [steep.get((layer, head), 0.1) for layer, head in zip(table["layer"], table["head"], strict=True)]
    table["value"] = table["distance"] * slopes
    figure = plot_distance(table, top=2)
    grey, coloured = figure.data[:4], figure.data[4:]
    assert [line.name for line in coloured] == ["layer 1, head 1", "layer 2, head 0"]  # in the order of heads
    assert {line.line.color for line in grey} == {GREY}
    assert GREY not in {line.line.color for line in coloured}
    assert [line.name for line in grey] == ["4 other heads"] * 4
    assert [line.showlegend for line in grey] == [True, False, False, False]
    assert [line.hovertext for line in grey] == [f"layer {n}, head {m}" for n, m in ((0, 0), (0, 1), (1, 0), (2, 1))]
    assert "the 2 of 6 heads whose profile varies most" in figure.layout.title.text
    point = torch.arange(30.0)[:, None] - torch.arange(30.0)
    noise = torch.randn(3, 30, 30, generator=torch.Generator().manual_seed(0))
    fit = fit_additive(torch.stack([0.02 * point, 0.2 * point, 0 * point]) + noise)
    assert plot_distance(fit, top=1).data[-1].name == "head 1"
    both = table.assign(distance=table["distance"] - 10)
    assert plot_distance(both).layout.xaxis.type is None  # heads that attend in both directions
    with pytest.raises(ValueError, match="log must be False or None for negative distances, got distances from -10"):
        plot_distance(both, log=True)


def test_scales_of_any_number_of_verdicts_end_at_1() -> None:
    """A browser replaces a scale that ends at 0.9999999999999999 by its own colours."""
    for n in range(1, 9):
        table = pd.DataFrame({"layer": 0, "head": range(n), "verdict": [f"{k}" for k in range(n)], "gap": 0.1})
        scale = plot_verdicts(table).data[0].colorscale
        assert (scale[0][0], scale[-1][0]) == (0.0, 1.0), n


def test_verdicts_have_their_colours_and_are_counted() -> None:
    figure = plot_verdicts(HEAD_VERDICTS.sample(frac=1, random_state=0))
    (heat,) = figure.data
    by_row = dict(
        zip(zip(HEAD_VERDICTS["layer"], HEAD_VERDICTS["head"], strict=True), HEAD_VERDICTS["verdict"], strict=True)
    )
    names = heat.colorbar.ticktext
    for (layer, head), verdict in by_row.items():
        i, j = heat.y.index(str(layer)), heat.x.index(str(head))
        number = int(heat.z[i][j])
        assert names[number] == verdict
        at = (number - heat.zmin) / (heat.zmax - heat.zmin)
        below, above = ([c for x, c in heat.colorscale if (x < at) == low] for low in (True, False))
        assert below[-1] == above[0] == VERDICTS.get(verdict, GREY)
        assert heat.text[i][j] == {"no effect": "–", "undecided": "?"}.get(verdict, verdict[0].upper())
        doubt = " between static and additive" if verdict == "undecided" else ""
        assert heat.customdata[i][j].startswith(f"{verdict}{doubt}<br>")
    assert "1 no effect, 1 distance, 2 static, 1 more than additive, 1 undecided" in figure.layout.title.text
    assert "± 0.01 (standard error) nats per token" in heat.customdata[0][0]
    read = pd.read_csv(io.StringIO(HEAD_VERDICTS.to_csv(index=False)))  # without "between", decided heads have NaN
    assert (plot_verdicts(read).data[0].customdata == heat.customdata).all()
    for unknown in (HEAD_VERDICTS.drop(columns="error"), HEAD_VERDICTS.assign(error=np.nan)):
        assert "±" not in str(plot_verdicts(unknown).data[0].customdata)
    (fewer,) = plot_verdicts(HEAD_VERDICTS.query("layer == 0 or head == 0")).data
    assert np.isnan(fewer.z).tolist() == [[False] * 3, [False, True, True]]  # heads that the table does not have
    assert fewer.text[1][1] == ""
    with pytest.raises(ValueError, match="must name layer and head in every row"):
        plot_verdicts(HEAD_VERDICTS.astype({"head": "Int64"}).assign(head=pd.NA))
    with pytest.raises(ValueError, match="one row for each layer, head, got several"):
        plot_verdicts(pd.concat([HEAD_VERDICTS, HEAD_VERDICTS]))


def heads_of(figure: go.Figure) -> dict[str, dict[str, Any]]:
    """What is drawn of each head of a plane, by its name; the hover text as plotly fills its template."""
    return {
        data[0]: {"trace": trace, "at": (x, y), "size": size, "label": label, "hover": filled(trace, data)}
        for trace in figure.data
        if trace.customdata is not None
        for x, y, size, label, data in zip(
            trace.x, trace.y, trace.marker.size, trace.text, trace.customdata, strict=True
        )
    }


def filled(trace: Any, data: Any) -> str:
    template = re.sub(r"%\{customdata\[(\d+)\](:[^}]*)?\}", r"{\1\2}", trace.hovertemplate)
    return template.removesuffix("<extra></extra>").format(*data)


def named(figure: go.Figure, name: str) -> Any:
    (trace,) = (trace for trace in figure.data if trace.name == name)
    return trace


def test_the_plane_has_each_head_at_its_parts() -> None:
    figure = plot_where_or_what(PLANE, labels=2)
    drawn = heads_of(figure)
    rows = {head_label(row["layer"], row["head"]): row for _, row in PLANE.dropna().iterrows()}  # L1H1 has no parts
    assert drawn.keys() == rows.keys()
    for name, row in rows.items():
        head, verdict = drawn[name], row["verdict"]
        assert (head["trace"].name, head["at"]) == (verdict, (row["where_part"], row["what_part"]))
        assert head["size"] ** 2 == pytest.approx(drawn["L0H2"]["size"] ** 2 * row["contribution"] / 0.16)  # areas
        assert head["label"] == (name if name in ("L0H2", "L1H2") else "")
        assert head["trace"].marker.color == NEEDS[verdict]
        assert head["trace"].marker.symbol == {"undecided": "diamond", "not used": "line-ew"}.get(verdict, "circle")
    assert "2 where, 1 what, 1 mixed, 1 undecided, 1 not used" in figure.layout.title.text
    outlines = [trace for trace in figure.data if trace.name == "joint above 0.3"]
    assert [trace.showlegend for trace in outlines] == [True, False]
    for trace, name, symbol in zip(outlines, ("L1H0", "L0H1"), ("circle", "diamond"), strict=True):
        assert ((*trace.x, *trace.y), *trace.marker.size) == (
            drawn[name]["at"],
            drawn[name]["size"] + trace.marker.line.width,
        )
        assert trace.marker.symbol == f"{symbol}-open"
    for without in (PLANE.assign(joint=0.3), PLANE.drop(columns="joint")):
        assert "joint above 0.3" not in {trace.name for trace in plot_where_or_what(without).data}


def test_the_plane_bounds_the_regions_of_its_verdicts() -> None:
    """The parts of a head on a line: they sum to one, a half is neither, or two of them differ by .2."""
    mixed, half, triangle = (
        [tuple(map(float, corner.split(","))) for corner in shape.path[1:].split("L")]
        for shape in plot_where_or_what(PLANE).layout.shapes
    )
    assert triangle == [(0, 0), (1, 0), (0, 1), (0, 0)]
    assert [1 - where - what for where, what in half] == [0.5, 0.5]
    assert [1 - where - what for where, what in mixed] == pytest.approx([0.5, 0, 0, 0.5])
    assert [where - what for where, what in mixed] == pytest.approx([0.2, 0.2, -0.2, -0.2])


def test_hovering_over_a_head_shows_its_numbers() -> None:
    columns = {"kept_distance": -0.8, "kept_content": 0.3, "kept_uniform": 0.1, "gate": 0.2, "measured": "estimated"}
    errors = {f"{name}_se": 0.03 for name in [*PLANE_COLUMNS[3:6], "joint", *columns] if name != "measured"}
    full = PLANE.assign(**columns, **errors, contribution_se=0.004, open="").astype({"open": object})
    full.loc[full["verdict"] == "undecided", "open"] = "mixed or what"
    after = full.assign(verdict="what", neither_part=0.25)
    hover = {name: head["hover"].split("<br>") for name, head in heads_of(plot_where_or_what(full)).items()}
    lines = [
        "where 40% ± 3%",
        "what 50% ± 3%",
        "neither 10% ± 3%",
        "joint 0.70 ± 0.03",
        "kept by distance -0.80 ± 0.03",
        "kept by content 0.30 ± 0.03",
        "kept by uniform 0.10 ± 0.03",
        "kept by gate 0.20 ± 0.03",
        "nats per token 0.02 ± 0.004",
    ]
    assert hover["L1H0"] == ["L1H0: mixed, estimated", *lines, "(± standard error over texts)"]
    assert hover["L0H1"][0] == "L0H1: undecided (mixed or what), estimated"
    short = heads_of(plot_where_or_what(PLANE))["L1H0"]["hover"].split("<br>")
    assert short == ["L1H0: mixed", "where 40%", "what 50%", "neither 10%", "joint 0.70", "nats per token 0.02"]
    hover = {name: head["hover"] for name, head in heads_of(plot_where_or_what(full, after=after)).items()}
    assert hover["L1H0"].startswith(
        "<br>".join(["L1H0: mixed, estimated", *lines, "after: what, estimated", *lines[:2], "neither 25% ± 3%"])
    )
    assert hover["L1H0"].count("standard error") == 1


def test_random_copies_are_crosses_behind_the_heads() -> None:
    """Of those that are used, of as many copies as there are."""
    copies = pd.concat([PLANE.assign(seed=seed, what_part=0.01 * seed) for seed in (1, 2)])
    first, *others = plot_where_or_what(PLANE, random=copies).data
    used = copies[copies["verdict"] != "not used"]
    assert [*zip(first.x, first.y, strict=True)] == [*zip(used["where_part"], used["what_part"], strict=True)]
    assert (first.name, first.marker.symbol, first.marker.line.color) == ("random weights", "x-thin", GREY)
    assert [trace.name for trace in others] == [trace.name for trace in plot_where_or_what(PLANE).data]


def test_arrows_join_the_places_of_heads_in_two_models() -> None:
    """In any order of the rows; not of heads that stay, nor of those that one of the models does not use."""
    moves = {"L0H0": (-0.3, 0.2), "L0H1": (0.0, 0.05), "L0H2": (0.03, -0.02), "L1H0": (0.1, -0.1), "L1H2": (-0.5, 0)}
    before = PLANE.assign(name=[head_label(*head) for head in zip(PLANE["layer"], PLANE["head"], strict=True)])
    after = before.assign(verdict=["what", "what", "what", "not used", "what", "mixed"])
    for name, (across, up) in moves.items():
        after.loc[after["name"] == name, ["where_part", "what_part"]] += np.array([across, up])
    figure = plot_where_or_what(before, after=after.sample(frac=1, random_state=1))
    arrows = named(figure, "after")
    assert (arrows.marker.symbol, arrows.marker.angleref) == ("arrow", "previous")
    places = np.stack([arrows.x, arrows.y], 1).reshape(-1, 3, 2)  # from, to, and a gap
    expected = []
    for name in ("L0H0", "L0H1", "L1H2"):
        ends = [table.loc[table["name"] == name, ["where_part", "what_part"]].iloc[0] for table in (before, after)]
        expected.append(np.array([*ends, [NAN, NAN]], dtype=float))
    np.testing.assert_allclose(places, np.stack(expected))
    assert list(arrows.marker.size) == [0, 10, 0] * 3
    assert list(arrows.marker.color[1::3]) == [NEEDS[verdict] for verdict in ("what", "what", "mixed")]
    assert heads_of(figure).keys() == heads_of(plot_where_or_what(before)).keys()
    text = figure.layout.title.text
    for when, table in (("before", before), ("after", after)):
        counts = re.findall(r"(\d+) ([a-z ]+)", text.partition(f"{when}: ")[2].partition("<")[0])
        assert {word: int(n) for n, word in counts} == table["verdict"].value_counts().to_dict()


def test_a_table_of_verdicts_is_for_another_plot() -> None:
    """Words have no colour in ``plot_heads``; its error names the function that draws them."""
    what, ladder = "plot_where_or_what draws that of where_or_what$", "plot_verdicts draws that of head_verdicts$"
    with pytest.raises(ValueError, match=f"a table without gap: {what}"):
        plot_verdicts(PLANE)
    verdicts = HEADS.assign(verdict="static", gap=0.1)
    for table, maker in ((PLANE, what), (verdicts, ladder)):
        with pytest.raises(ValueError, match=rf"^column verdict must be numbers, got (str|object): {maker}"):
            plot_heads(table, "verdict")
    with pytest.raises(ValueError, match=r"^column label must be numbers, got (str|object)$"):
        plot_heads(HEADS.assign(label="induction"), "label")


def test_the_same_heads_are_in_both_tables() -> None:
    with pytest.raises(ValueError, match="after must have the heads of table, got one without L0H0"):
        plot_where_or_what(PLANE, after=PLANE.query("layer == 1"))
    with pytest.raises(ValueError, match="after must have the heads of table, got one with L1H0 as well"):
        plot_where_or_what(PLANE.query("layer == 0"), after=PLANE)
    with pytest.raises(ValueError, match=r"after must have the columns .* got a table without what_part"):
        plot_where_or_what(PLANE, after=PLANE.drop(columns="what_part"))
    with pytest.raises(ValueError, match=r"random must have the columns .* got a table without verdict"):
        plot_where_or_what(PLANE, random=PLANE.drop(columns="verdict"))


def test_groups_are_named_in_the_plane() -> None:
    """Where ``where_or_what`` measured groups, their heads are shown too."""
    groups = PLANE.drop(columns=["layer", "head"]).assign(group=[*"abcdef"], heads="L1H2, L3H4")
    figure = plot_where_or_what(groups)
    by_name, by_head = heads_of(figure), heads_of(plot_where_or_what(PLANE))
    assert {name: head["at"] for name, head in by_name.items()} == {
        "abcdef"[3 * int(name[1]) + int(name[3])]: head["at"] for name, head in by_head.items()
    }
    assert by_name["c"]["label"] == "c"
    assert by_name["c"]["hover"].endswith("nats per token 0.16<br>L1H2, L3H4")
    with pytest.raises(ValueError, match="one row for each group, got several for a"):
        plot_where_or_what(pd.concat([groups, groups]))


Boxes = dict[str, np.ndarray]


def drawn_at(figure: go.Figure, width: float, height: float) -> tuple[Boxes, Boxes, Boxes]:
    """The rectangles of labels and of markers, if the area inside the axes has this size: left, top, right, bottom.

    And for labels away from their heads the ends of the lines to them.
    """
    labels, markers, lines = Boxes(), Boxes(), Boxes()
    (left, right), (low, high) = figure.layout.xaxis.range, figure.layout.yaxis.range

    def place(x: float, y: float) -> np.ndarray:
        return np.array([width * (x - left) / (right - left), height * (high - y) / (high - low)])

    def box(text: str, middle: np.ndarray) -> np.ndarray:
        half = np.array([7 * len(text), 12]) / 2
        return np.concatenate([middle - half, middle + half])

    for trace in figure.data:
        if trace.customdata is None:
            continue  # outlines
        columns = (trace.x, trace.y, trace.marker.size, trace.text, trace.textposition, trace.customdata)
        for x, y, size, text, side, (name, *_) in zip(*columns, strict=True):
            at = place(x, y)
            markers[name] = np.concatenate([at - size / 2, at + size / 2])
            if text:
                up, across = side.split()
                direction = np.array([{"left": -1, "right": 1}.get(across, 0), {"top": -1, "bottom": 1}.get(up, 0)])
                half = np.array([7 * len(text), 12]) / 2
                labels[name] = box(text, at + direction * (half + size / 1.6 + 1))  # as plotly places text
    for far in figure.layout.annotations:
        if far.ax is not None:
            at, away = place(far.x, far.y), np.array([far.ax, far.ay])
            lines[far.text] = np.stack([at, at + away])
            labels[far.text] = box(far.text, at + away)
    return labels, markers, lines


def are_apart(one: np.ndarray, other: np.ndarray) -> bool:
    return bool((one[2:] <= other[:2]).any() or (other[2:] <= one[:2]).any())


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [(240, 380), (240, 420), (500, 400), (760, 420), (1000, 380), (1900, 400)]),
        ({"width": 340, "height": 300}, [(255, 140), (255, 150), (255, 160)]),
    ],
    ids=["free", "small"],
)
@pytest.mark.parametrize("seed", range(5))
def test_labels_of_the_plane_lie_over_nothing(options: Any, sizes: list[tuple[int, int]], seed: int) -> None:
    """No other label or line to one, no large marker of another head, nor the edge of the axes; some are there."""
    figure = plot_where_or_what(random_plane(seed), **options)
    for width, height in sizes:
        labels, markers, lines = drawn_at(figure, width, height)
        assert len(labels) >= 3
        for name, box in labels.items():
            assert box.min() >= 0
            assert (box[2:] <= (width, height)).all()
            others = [other for other, marker in markers.items() if other != name and marker[2] - marker[0] >= 8]
            assert [other for other in others if not are_apart(box, markers[other])] == []
            assert [other for other in labels if other != name and not are_apart(box, labels[other])] == []
            assert [other for other, line in lines.items() if other != name and crosses(line, box)] == []


def random_plane(seed: int) -> pd.DataFrame:
    chance = np.random.default_rng(seed)
    parts = dict(zip(PLANE_COLUMNS[3:6], chance.dirichlet([0.5, 0.5, 0.5], 24).T, strict=True))
    table = by_head(4, 6).assign(verdict="mixed", **parts, joint=chance.uniform(size=24))
    return table.assign(contribution=chance.exponential(size=24))


def crosses(line: np.ndarray, box: np.ndarray) -> bool:
    """Whether a line has a point inside a rectangle."""
    points = line[0] + np.linspace(0, 1, 400)[:, None] * (line[1] - line[0])
    return bool(((points > box[:2]) & (points < box[2:])).all(1).any())


@pytest.mark.parametrize("spread", [1.0, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_the_largest_heads_of_the_plane_are_named(seed: int, spread: float) -> None:
    """Where they lie apart, and where they lie close together."""
    table, parts = random_plane(seed), PLANE_COLUMNS[3:6]
    table[parts] = spread * table[parts] + (1 - spread) * np.array([0.5, 0.45, 0.05])
    largest = table.sort_values("contribution", ascending=False)[:8]
    labels, _, _ = drawn_at(plot_where_or_what(table, labels=8, width=760), 675, 400)
    assert labels.keys() == {head_label(*head) for head in largest[["layer", "head"]].itertuples(index=False)}


@pytest.mark.parametrize(("where", "what"), [(0.9, 0.1), (0.0, 0.95), (0.3, 0.3), (0.1, 0.0)])
def test_a_plane_of_one_head_names_it_and_has_its_errors(where: float, what: float) -> None:
    """An error bar reaches one standard error to both sides, as far as a part can be."""
    one = PLANE.query("layer == 0 and head == 0").assign(where_part=where, what_part=what)
    figure = plot_where_or_what(one.assign(where_part_se=0.2, what_part_se=0.25))
    assert figure.layout.title.text == "What L0H0 needs"
    (trace,) = figure.data
    for part, error, bar in ((where, 0.2, trace.error_x), (what, 0.25, trace.error_y)):
        ends = part - bar.arrayminus[0], part + bar.array[0]
        assert ends == pytest.approx((max(part - error, 0), min(part + error, 1)))
    two = plot_where_or_what(PLANE.head(2).assign(where_part_se=0.2, what_part_se=0.25))
    assert [trace.error_x.array for trace in two.data] == [None] * 3
    assert plot_where_or_what(one).data[0].error_x.array is None


def test_a_head_is_in_a_plane_once() -> None:
    with pytest.raises(ValueError, match="one row for each layer and head, got several for L0H0: select the rows of"):
        plot_where_or_what(pd.concat([PLANE, PLANE.query("layer == 0")]))


def test_error_bars_are_those_of_the_table() -> None:
    errors = HEADS.assign(effect_se=HEADS["r"] / 100)
    (heat,) = plot_heads(errors, "effect").data
    assert heat.customdata[2][1] == 0.21
    assert "±" in heat.hovertemplate


def test_distance_marks_the_wavelengths_that_occur() -> None:
    table = pd.DataFrame({"distance": range(201), "value": np.linspace(3, -1, 201)})
    marks = plot_distance(table, wavelengths=[500.0, 6.283, 100.0, 8.0, float("inf")], log=False).data[-1]
    assert marks.name == "wavelengths"
    assert list(marks.x) == [6.283, 6.283, None, 8.0, 8.0, None, 100.0, 100.0, None]
    assert list(marks.y) == [-0.98, 3, None] * 3  # from the lowest to the highest mean that is drawn
    assert list(marks.text)[1::3] == ["6", "", "100"]  # no room for the 8
    marks = plot_distance(table, wavelengths=[6.283, 7.0, 100.0]).data[-1]
    assert list(marks.x)[::3] == [7.283, 8.0, 101.0]
    assert list(marks.customdata)[::3] == [6.283, 7.0, 100.0]


def test_perturbation_bands_are_mean_and_standard_error() -> None:
    figure = plot_perturbation(PERTURBATION)
    order_band, order, index_band, index = figure.data
    assert (order.name, list(order.x), list(order.y)) == ("order", [0, 0.5], [0, 0.3])  # sorted; nothing at 1
    assert list(order_band.x) == [0, 0.5, 0.5, 0]
    assert np.allclose(order_band.y, [0, 0.4, 0.2, 0])
    assert (order_band.fill, order_band.hoverinfo, order_band.showlegend) == ("toself", "skip", False)
    assert (index.name, list(index.y), len(index_band.x)) == ("index", [0.2], 0)  # a single seed has no error
    assert order_band.fillcolor == faint(order.line.color) != faint(index.line.color)
    assert order.marker.symbol != index.marker.symbol


def test_of_two_draws_both_are_points() -> None:
    """Which have the mean and the standard error of the table; of three, there is a band."""
    draws = np.array([[0.0, 0.1, 0.5], [0.0, 0.3, NAN]])
    runs = pd.DataFrame({"fraction": [0, 0.5, 1] * 2, "added_loss": draws.ravel()}).groupby("fraction")["added_loss"]
    table = pd.DataFrame({"kind": "order", "draws": 2, "added_loss": runs.mean(), "added_loss_se": runs.sem()})
    points, line = plot_perturbation(table.reset_index()).data
    assert points.mode == "markers"
    seen = sorted((x, round(y, 9)) for x, y in zip(points.x, points.y, strict=True) if np.isfinite(y))
    assert seen == [(0, 0), (0, 0), (0.5, 0.1), (0.5, 0.3)]  # nothing at 1, where one draw alone has a number
    assert list(line.y) == pytest.approx([0, 0.2, 0.5])
    assert plot_perturbation(table.reset_index().assign(draws=3)).data[0].fill == "toself"
    band, line = plot_perturbation(table.reset_index().drop(columns=["added_loss_se", "draws"])).data  # of one draw
    assert (len(band.x), list(line.y)) == (0, pytest.approx([0, 0.2, 0.5]))


def test_length_is_level_over_each_bucket() -> None:
    other = LENGTH.assign(loss=[3.5, 3.0])
    figure = plot_length({"as it is": LENGTH, "window": other}, ["loss", "entropy"], in_range=100)
    lines = {(line.name, line.yaxis): line for line in figure.data}
    assert list(lines["as it is", "y"].x) == [0, 100, 100, 300]
    assert list(lines["as it is", "y"].y) == [3, 3, 5, 5]
    assert list(lines["window", "y"].y) == [3, 3, 3.5, 3.5]
    assert list(lines["window", "y2"].y) == [1, 1, 2, 2]
    assert [line.showlegend for line in figure.data] == [True, False, True, False]
    assert [(line.x0, line.x1) for line in figure.layout.shapes] == [(100, 100)] * 2
    assert [a.title.text for a in figure.select_yaxes()] == ["loss (nats per token)", "entropy of attention (nats)"]
    assert not plot_length(LENGTH, ["loss"]).layout.shapes
