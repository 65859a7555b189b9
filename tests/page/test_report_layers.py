"""Layers with sliding windows and rotary bases of their own are told apart, and every map has all layers and heads."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from support import zoo
from support.documents import Document, as_number

import tl_posdisent as tp
from tl_posdisent.models import read_model
from tl_posdisent.page.drawing.atlas_map import map_caption
from tl_posdisent.page.drawing.maps import UNKNOWN, complete, head_map
from tl_posdisent.page.drawing.provenance import windows
from tl_posdisent.page.measuring.subject import read_subject
from tl_posdisent.page.sections.subspaces import layers_by_frequencies
from tl_posdisent.viz import plot_heads, plot_verdicts

KINDS = {0: "local, 5", 1: "local, 5", 2: "global"}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Document]:
    """A toy Gemma 3: layers 0 and 1 have windows of 5 and one rotary base, layer 2 sees all and has another base."""
    model, tokens = zoo.bridge("gemma3"), zoo.random_tokens(length=24, batch=2)
    sections: Any = ["additivity", "shares", "subspaces", "labels", "ablation"]
    path = tmp_path_factory.mktemp("report") / "r.html"
    return model, tokens, Document(tp.report(model, tokens, path, sections=sections, control=1, progress=False))


def test_tables_and_maps_name_the_attention_of_each_layer(gemma: tuple[Any, Any, Document]) -> None:
    model, _, document = gemma
    listed = read_model(model).to_frame()
    assert {
        row.layer: "global" if row.attention == "global" else f"local, {row.window}" for row in listed.itertuples()
    } == KINDS
    assert document.wrong == []
    for name in ("atlas", "heads-r", "layers-r", "heads-shares", "layers-shares", "heads-labels", "heads-ablation"):
        rows = document.rows(name)
        assert len(rows) in (3, 8, 24), name
        for row in rows:
            layer = int(row["layer"] if "layer" in row else re.findall(r"\d+", row["head"])[0])
            assert row["attention"] == KINDS[layer], name
    maps = [one for one in document.figures if one["data"][0]["type"] == "heatmap" and len(one["data"][0]["y"]) == 3]
    assert len(maps) == 4  # the atlas, two of r, the added loss
    for one in maps:
        axis = one["layout"]["yaxis"]
        assert dict(zip(axis["tickvals"], axis["ticktext"], strict=True)) == {
            str(layer): f"{kind} · {layer}" for layer, kind in KINDS.items()
        }


@pytest.mark.parametrize(
    ("length", "said"),
    [(24, "the longest text reaches it"), (5, "the window was never reached: the longest text has 5 tokens")],
)
def test_whether_a_text_reaches_the_window_is_said(length: int, said: str, gemma: tuple[Any, Any, Document]) -> None:
    """A text as long as the window is not cut by it: the last query still sees the first key."""
    subject = read_subject(gemma[0], zoo.random_tokens(length=length))
    assert all(bool(spec.mask(length)[-1, 0]) == (length == 5 or spec.window is None) for spec in subject.specs)
    window = "2 local layers with a window of 5 tokens, the query’s own included, and 1 global layer (2)"
    assert windows(subject) == {"Windows": f"{window}; {said}"}
    wide = replace(subject.specs[0], window=20)
    both = windows(replace(subject, specs=[wide, *subject.specs[1:]]))["Windows"]
    assert "a window of 5 or 20 tokens" in both
    missed = "5 or 20" if length == 5 else "20"
    assert (f"the window of {missed} was never reached" in both) == (length == 5)
    assert windows(replace(subject, specs=[subject.specs[2]])) == {}


def test_a_model_without_windows_has_no_such_column(tmp_path: Path) -> None:
    tokens = tp.demo_tokens(length=17)[:, 1:]
    options: dict[str, Any] = {"sections": ["additivity"], "control": 0, "progress": False}
    document = Document(tp.report(tp.load_demo_model(), tokens, tmp_path / "r.html", **options))
    assert "attention" not in document.rows("atlas")[0]
    assert "Windows" not in document.text


def test_subspaces_are_averaged_over_layers_of_one_base(gemma: tuple[Any, Any, Document]) -> None:
    """Each row has a wavelength that its layers have, and the figures beside have it on their axis."""
    model, tokens, document = gemma
    groups = layers_by_frequencies(read_subject(model, tokens))
    assert [*groups.values()] == [[0, 1], [2]]
    assert len({tuple(spec.rotary.frequencies.tolist()) for spec in read_model(model).attention}) == 2
    patterns = tp.subspace_patterns(model, tokens, progress=False)
    charts = [one for one in document.figures if one["data"][0]["type"] == "bar" and len(one["data"]) == 3]
    for name, chart, layers in zip(("subspaces", "subspaces-2"), charts, groups.values(), strict=True):
        rows, expected = document.rows(name), patterns[patterns["layer"].isin(layers)].groupby("subspace")
        assert expected["wavelength"].nunique().max() == 1
        shown = [as_number(row["wavelength"]) for row in rows]
        waves = expected["wavelength"].first()
        assert shown == pytest.approx(waves.tolist(), abs=0.06)
        assert [as_number(row["semantic"]) for row in rows] == pytest.approx(
            expected["semantic"].mean().tolist(), abs=6e-4
        )
        assert chart["layout"]["xaxis"]["title"]["text"] == "wavelength (positions)"
        assert [*chart["data"][0]["x"]] == [f"{wave:.0f}" for wave in waves]
    assert "Layers differ in their frequencies" in document.text


def test_maps_have_all_layers_and_heads_and_mark_those_without_a_value() -> None:
    """Cells of measured heads keep their numbers, a 0 is not the missing colour, and the others are in the legend."""
    subject = read_subject(tp.load_demo_model(), tp.demo_tokens(length=8))
    table = pd.DataFrame({"layer": [1, 1, 3], "head": [2, 5, 7], "gap": [0.5, 0.0, 0.25]})
    verdicts = table.assign(verdict=["static", "no effect", "undecided"])
    for drawn in (plot_heads(table, "gap"), plot_verdicts(verdicts)):
        said = captions(head_map(go.Figure(drawn), "Gap", subject))
        assert said == [f"Gap; grey: {40 - len(table)} heads without a number (crossed)"]
        before = {
            (layer, head): drawn.data[0].z[i][j]
            for i, layer in enumerate(drawn.data[0].y)
            for j, head in enumerate(drawn.data[0].x)
        }
        after = complete(drawn, subject)
        heat, crosses = after.data
        ends = [(axis.autorange, axis.range) for axis in (after.layout.xaxis, after.layout.yaxis)]
        assert ends == [(False, (-0.5, 7.5)), (False, (4.5, -0.5))]  # the edges of cells, not beyond the crosses
        assert [*heat.x] == [str(n) for n in range(8)]
        assert [*heat.y] == [str(n) for n in range(5)]
        missing = set(zip(crosses.y, crosses.x, strict=True))
        for (i, j), z in np.ndenumerate(np.array(heat.z, dtype=float)):
            known = ((table["layer"] == i) & (table["head"] == j)).any()
            assert known == np.isfinite(z) == ((str(i), str(j)) not in missing)
            if known:
                assert z == before[str(i), str(j)]
        assert (crosses.name, crosses.showlegend, after.layout.plot_bgcolor) == ("not measured", True, UNKNOWN)
        assert UNKNOWN not in str(heat.colorscale)
    whole = pd.DataFrame([(i, j, 0.0) for i in range(5) for j in range(8)], columns=["layer", "head", "gap"])
    assert len(complete(plot_heads(whole, "gap"), subject).data) == 1
    assert captions(head_map(plot_heads(whole, "gap"), "Gap", subject)) == ["Gap"]


def test_cells_of_heads_that_are_not_analysed_are_no_missing_numbers() -> None:
    """Three chosen heads in two layers make a map of two rows and three columns."""
    subject = read_subject(tp.load_demo_model(), tp.demo_tokens(length=8), None, ["L1H2", "L1H5", "L3H7"])
    table = pd.DataFrame({"layer": [1, 1, 3], "head": [2, 5, 7], "gap": [0.5, np.nan, 0.25]})
    assert captions(head_map(plot_heads(table, "gap"), "Gap", subject)) == [
        "Gap; grey: 1 head without a number (crossed) and 3 cells without an analysed head"
    ]
    assert complete(plot_heads(table.fillna(0), "gap"), subject).layout.plot_bgcolor == UNKNOWN
    assert (
        map_caption("Gap", table, 1)
        == "Gap, by head; grey: 1 head without a number and 3 cells without an analysed head"
    )


def captions(html: str) -> list[str]:
    return re.findall("<figcaption>(.*)</figcaption>", html)
