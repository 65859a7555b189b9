"""What the page's script draws is in the page: the measures to choose from, and the numbers of each head's panel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pandas as pd
import pytest
from support.documents import Document, as_number, decoded

import tl_posdisent as tp
from tl_posdisent.page import contract
from tl_posdisent.page.atlas import colours_of
from tl_posdisent.page.markup import read
from tl_posdisent.page.panels import describe_heads, measure_attention
from tl_posdisent.page.section import Measured
from tl_posdisent.page.subject import read_subject

TOKENS = tp.demo_tokens(length=161)[:, 1:].view(2, 80)


def report_of(model: Any, folder: Path, tokens: Any = TOKENS, **options: Any) -> Document:
    options = {"sections": ["additivity", "distance"], "control": 0, "progress": False} | options
    return Document(tp.report(model, tokens, folder / "report.html", **options))


def test_the_data_are_those_of_the_contract(tmp_path: Path) -> None:
    """No field more or less, each of them read by the script."""
    document = report_of(tp.load_demo_model(), tmp_path, TOKENS[:, :12], layers=[1], heads=[0])
    data, script = document.data["atlas-data"], read("atlas.js")
    colour, panel = next(iter(data["colours"].values())), data["panels"]["L1H0"]
    for kind, found in (("AtlasData", data), ("Colour", colour), ("Panel", panel)):
        assert set(found) == set(get_type_hints(getattr(contract, kind)))
        for name in found:
            assert name in script, name


def test_panels_have_the_scores_and_profiles_of_each_head(tmp_path: Path) -> None:
    model = tp.load_demo_model()
    document = report_of(model, tmp_path, layers=[1, 4], seed=3)
    data = document.data["atlas-data"]
    assert [*data["panels"]] == [row["head"] for row in document.rows("atlas")]
    assert data["words"] == [word.replace("\n", "\\n") for word in model.to_str_tokens(TOKENS[0])[:48]]
    profiles = {
        x.layer: tp.fit_additive(x.scores, pool=True).distance for x in tp.capture(model, TOKENS, layers=[1, 4])
    }
    assert len(data["panels"]) == 16
    assert data["distances"] == [0, 1, 2, 4, 8, 16, 32, 64]
    for layer in tp.capture(model, TOKENS[:1, :48], layers=[1, 4]):
        for head in range(8):
            one = data["panels"][f"L{layer.layer}H{head}"]
            expected = np.where(np.tri(48) > 0, layer.scores[0, head].numpy(), np.nan)
            step = float(np.nanmax(expected) - np.nanmin(expected)) / 254
            found = decoded(one["scores"], 48, causal=True)
            assert found == pytest.approx(expected, abs=0.51 * step, nan_ok=True)
            assert np.nanmax(found) - np.nanmin(found) == pytest.approx(254 * step)
            assert one["profile"] == pytest.approx(profiles[layer.layer][head, data["distances"]].tolist(), abs=6e-4)


def test_the_map_chooses_among_the_numbers_of_the_table(tmp_path: Path) -> None:
    sections = ["additivity", "distance", "ablation"]
    document = report_of(tp.load_demo_model(), tmp_path, TOKENS[:, :24], layers=[0, 3], sections=sections)
    offered, rows = document.data["atlas-data"], document.rows("atlas")
    assert offered["labels"] == [row["head"] for row in rows]
    titles = {"share_distance": "distance alone", "share_key": "key alone", "r_held_out": "held-out r"}
    titles |= {"effect": "added loss"}
    assert set(offered["colours"]) == set(titles)  # what heads need was not measured
    for name, title in titles.items():
        numbers, colour = [as_number(row[title]) for row in rows], offered["colours"][name]
        assert colour["values"] == pytest.approx(numbers, abs=6e-4)
        assert colour["low"] <= min(colour["values"]) + 1e-5 < max(colour["values"]) - 1e-5 <= colour["high"]
        assert colour["names"] == []
    menus = [tag for tag, _ in document.attributes if tag in ("select", "option", "label")]
    assert menus.count("select") == 3
    assert menus.count("label") == 3 + sum(tag == "input" for tag, _ in document.attributes)
    assert menus.count("option") == 1 + 3 * len(titles)


def test_a_head_without_a_number_is_no_head_with_0() -> None:
    """It is null in the data, and its cell has the background's colour, which is in none of the scales."""
    table = pd.DataFrame({"layer": 0, "head": range(4), "r": 0.5, "effect": [0.5, 0.0, np.nan, -0.25]})
    verdicts = ["where", "undecided", None, "what"]
    colours = colours_of(table.assign(verdict=verdicts))
    assert colours["effect"]["values"] == [0.5, 0.0, None, -0.25]
    names = colours["verdict"]["names"]
    assert [None if code is None else names[int(code)] for code in colours["verdict"]["values"]] == verdicts
    assert 'const unknown = "#b9b9b9"' in read("atlas.js")
    assert "#b9b9b9" not in str([colour["scale"] for colour in colours.values()])


def test_the_panel_has_the_attention_by_distance_of_its_head(tmp_path: Path) -> None:
    """As the model is, and with an intervention on the layer itself, at distances 0, 1, 2, 4 …"""
    model, tokens = tp.load_demo_model(), tp.demo_tokens(length=65)[:, 1:].view(2, 32)
    data = report_of(model, tmp_path, tokens, sections=["additivity"], layers=[1, 3]).data["atlas-data"]
    assert data["attended"] == [0, 1, 2, 4, 8, 16]
    named = {"every distance 5": tp.dummy_distance(model, 5, layers=[3])}
    table = tp.experiments.attention_by_distance(model, tokens, named, layers=[3], progress=False)
    attention = data["panels"]["L3H6"]["attention"]
    for name in ("unmodified", "every distance 5"):
        rows = table[(table["intervention"] == name) & (table["head"] == 6) & table["distance"].isin(data["attended"])]
        assert attention[name] == pytest.approx(rows["attention"].tolist(), rel=6e-3)
    assert attention["unmodified"] != attention["every distance 5"]


def test_heads_without_attention_are_described_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers that show neither a pattern nor scores; nothing is said of their attention."""
    model, tokens = tp.load_demo_model(), tp.demo_tokens(length=65)[:, 1:].view(2, 32)
    subject = read_subject(model, tokens)
    blind = [replace(spec, taps=replace(spec.taps, pattern=None, scores=None)) for spec in subject.specs]
    monkeypatch.setattr(type(subject), "specs", property(lambda _: blind))
    attention, reasons = measure_attention(subject, subject.pairs)
    assert (len(attention), reasons) == (0, {})
    table = tp.additivity(model, tokens, layers=[2], progress=False)
    says = describe_heads({"additivity": Measured(subject, table)}, attention)
    assert [*says] == [(2, head) for head in range(8)]
    assert not [x for sentences in says.values() for x in sentences if "attention" in x]
