"""What the page's script draws is in the page: the measures to choose from, and the numbers of each head's panel."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support import zoo
from support.documents import Document, as_number

import tl_posdisent as tp
from tl_posdisent.page.deciding.heads import describe_heads
from tl_posdisent.page.drawing.atlas_map import choices
from tl_posdisent.page.drawing.atlas_table import atlas_table
from tl_posdisent.page.measuring.measurement import Measurement
from tl_posdisent.page.measuring.panels import _attention
from tl_posdisent.page.measuring.subject import read_subject
from tl_posdisent.page.sections.additivity import SHARES

TOKENS = tp.demo_tokens(length=161)[:, 1:].view(2, 80)


def report_of(model: Any, folder: Path, tokens: Any = TOKENS, **options: Any) -> Document:
    options = {"sections": ["additivity", "distance", "ablation"], "control": 0, "progress": False} | options
    return Document(tp.report(model, tokens, folder / "report.html", **options))


def decoded(scores: list[Any], n: int, *, causal: bool) -> np.ndarray:
    """As the page's script reads them."""
    low, high, text = scores
    found = np.frombuffer(base64.b64decode(text), np.uint8)
    cells = np.full((n, n), 255.0)
    cells[np.tril(np.ones_like(cells)) > 0 if causal else cells > 0] = found
    return np.where(cells == 255, np.nan, low + cells / 254 * (high - low))


def test_panels_have_the_scores_and_profiles_of_each_head(tmp_path: Path) -> None:
    model = tp.load_demo_model()
    document = report_of(model, tmp_path, seed=3, sections=["additivity", "distance"])
    data = document.data["panels"]
    assert [*data["heads"]] == [row["head"] for row in document.rows("atlas")]
    assert data["words"] == [word.replace("\n", "\\n") for word in model.to_str_tokens(TOKENS[0])[:48]]
    profiles = np.concatenate([tp.fit_additive(x.scores, pool=True).distance for x in tp.capture(model, TOKENS)])
    assert data["distances"] == [0, 1, 2, 4, 8, 16, 32, 64]
    for layer in tp.capture(model, TOKENS[:1, :48]):
        for head in range(8):
            one = data["heads"][f"L{layer.layer}H{head}"]
            expected = np.where(np.tri(48) > 0, layer.scores[0, head].numpy(), np.nan)
            step = float(np.nanmax(expected) - np.nanmin(expected)) / 254
            found = decoded(one["scores"], 48, causal=True)
            assert found == pytest.approx(expected, abs=0.51 * step, nan_ok=True)
            assert np.nanmax(found) - np.nanmin(found) == pytest.approx(254 * step)
            assert one["profile"] == pytest.approx(
                profiles[8 * layer.layer + head, data["distances"]].tolist(), abs=6e-4
            )


@pytest.mark.skipif(zoo.TL_MAJOR >= 4, reason="HookedTransformer was removed in TransformerLens 4")
def test_keys_after_the_query_are_there_if_a_model_sees_them(tmp_path: Path) -> None:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    sizes = {"n_layers": 2, "n_heads": 3, "d_model": 24, "d_head": 8, "d_mlp": 32, "n_ctx": 32, "d_vocab": 61}
    config = HookedTransformerConfig(**sizes, act_fn="relu", attention_dir="bidirectional", seed=0)
    model, tokens = HookedTransformer(config).eval(), zoo.random_tokens()
    data = report_of(model, tmp_path, tokens, sections=["additivity"]).data["panels"]
    for layer in tp.capture(model, tokens[:1]):
        for head in range(3):
            found = decoded(data["heads"][f"L{layer.layer}H{head}"]["scores"], tokens.shape[1], causal=False)
            expected = layer.scores[0, head].numpy()
            assert found == pytest.approx(expected, abs=float(0.51 * np.ptp(expected) / 254))


def test_a_window_masks_keys(tmp_path: Path, shared_model: Any) -> None:
    """Scores outside of a layer's window are arbitrary, so they are not shown."""
    model, tokens = shared_model("bridge", "gemma2"), zoo.random_tokens(length=24)
    document = report_of(model, tmp_path, tokens, sections=["additivity", "distance"])
    masks = {spec.layer: spec.mask(24).numpy() for spec in tp.read_model(model).attention}
    assert min(mask.sum() for mask in masks.values()) < max(mask.sum() for mask in masks.values())
    for label, one in document.data["panels"]["heads"].items():
        found = decoded(one["scores"], 24, causal=True)
        assert (np.isfinite(found) == masks[int(label[1 : label.index("H")])]).all()
    windowed = [row for row in document.rows("atlas") if "\u2002" in row["profile"]]
    assert 0 < len(windowed) < len(document.rows("atlas"))  # a blank at distances without keys
    assert all(row["range"] != "–" for row in windowed)


def test_the_map_chooses_among_the_numbers_of_the_table(tmp_path: Path) -> None:
    document = report_of(tp.load_demo_model(), tmp_path)
    (figure,) = [one for one in document.figures if "choices" in one]
    offered, rows = figure["choices"], document.rows("atlas")
    assert offered["labels"] == [row["head"] for row in rows]
    axes = figure["layout"]["xaxis"], figure["layout"]["yaxis"]
    assert [axis["range"] for axis in axes] == [
        [-0.5, 7.5],
        [4.5, -0.5],
    ]  # the edges of cells, whatever marks are in them
    titles = {"share_distance": "distance alone", "share_key": "key alone", "r_held_out": "held-out r"}
    titles |= {"effect": "added loss"}
    assert set(offered["colours"]) == {"verdict", *titles}
    assert offered["colours"]["verdict"]["values"] == [None] * 40  # what heads need was not measured
    assert set(offered["axes"]) == set(titles)
    for name, title in titles.items():
        numbers = [as_number(row[title]) for row in rows]
        assert offered["colours"][name]["values"] == pytest.approx(numbers, abs=6e-4)
        assert offered["axes"][name]["values"] == offered["colours"][name]["values"]
        (heat,) = offered["colours"][name]["map"]
        assert heat["z"].ravel() == pytest.approx(numbers, abs=6e-4)
        marker = offered["colours"][name]["marker"]
        assert marker["cmin"] <= np.quantile(numbers, 0.05) + 1e-3 < np.quantile(numbers, 0.95) <= marker["cmax"]
    menus = [tag for tag, _ in document.attributes if tag in ("select", "option", "label")]
    assert menus.count("select") == 3
    assert menus.count("label") == 3 + sum(tag == "input" for tag, _ in document.attributes)
    assert menus.count("option") == len(offered["colours"]) + 1 + 2 * len(offered["axes"])


def test_a_head_without_a_number_is_no_head_with_0() -> None:
    """It is null in the data, and its cell has no colour: the background, which is in none of the scales, is seen."""
    table = pd.DataFrame({"layer": 0, "head": range(4), "r": 0.5, **dict.fromkeys(SHARES, 0.1)})
    effects = table[["layer", "head"]].assign(effect=[0.5, 0.0, np.nan, -0.25])
    pairs = [*table[["layer", "head"]].itertuples(index=False, name=None)]
    offered = choices(atlas_table(pairs, additivity=table, ablation=effects).heads)
    assert offered["colours"]["effect"]["values"] == offered["axes"]["effect"]["values"] == [0.5, 0.0, None, -0.25]
    (heat,) = offered["colours"]["effect"]["map"]
    assert np.isfinite(_array(heat["z"]).ravel()).tolist() == [True, True, False, True]
    scales = str([colour["marker"].get("colorscale") for colour in offered["colours"].values()])
    assert offered["unknown"] not in scales
    said = {name: colour["caption"].partition("; ")[2] for name, colour in offered["colours"].items()}
    assert said.pop("effect") == "grey: 1 head without a number"
    assert said.pop("verdict") == "grey: 4 heads without a number"
    assert set(said.values()) == {""}


def test_verdicts_keep_their_places_where_others_are_missing() -> None:
    """A layer and a column without any verdict are in the map all the same, which has the rows and columns of all."""
    places = pd.MultiIndex.from_product([range(3), range(4)], names=["layer", "head"]).to_frame(index=False)
    known = ["static", None, "no effect", "static", "not used", None, "static", "not used"]  # of layers 1 and 2
    heads = places.assign(ladder=[None] * 4 + known, gap=0.1)
    shown = choices(heads)["colours"]["ladder"]
    (drawn,) = shown["map"]
    codes = _array(drawn["z"]).ravel()
    assert [None if np.isnan(code) else code for code in codes] == shown["values"]
    assert drawn["y"] == ["0", "1", "2"]
    assert drawn["x"] == ["0", "1", "2", "3"]
    assert shown["caption"] == "verdict of the ladder, by head; grey: 6 heads without a number"


def _array(z: Any) -> np.ndarray:
    if isinstance(z, dict):
        return np.frombuffer(base64.b64decode(z["bdata"]), z["dtype"])
    return np.array(z, dtype=float)


def test_the_panel_has_the_attention_by_distance_of_its_head(tmp_path: Path) -> None:
    """As the model is, and with an intervention on the layer itself, at distances 0, 1, 2, 4 …"""
    model, tokens = tp.load_demo_model(), tp.demo_tokens(length=65)[:, 1:].view(2, 32)
    options: dict[str, Any] = {"sections": ["additivity"], "layers": [1, 3], "control": 0, "progress": False}
    panels = Document(tp.report(model, tokens, tmp_path / "r.html", **options)).data["panels"]
    assert panels["attended"] == [0, 1, 2, 4, 8, 16]
    named = {"every distance 5": tp.dummy_distance(model, 5, layers=[3])}
    table = tp.experiments.attention_by_distance(model, tokens, named, layers=[3], progress=False)
    for name in ("unmodified", "every distance 5"):
        rows = table[
            (table["intervention"] == name) & (table["head"] == 6) & table["distance"].isin(panels["attended"])
        ]
        assert panels["heads"]["L3H6"]["attention"][name] == pytest.approx(rows["attention"].tolist(), rel=6e-3)
    assert panels["heads"]["L3H6"]["attention"]["unmodified"] != panels["heads"]["L3H6"]["attention"][name]


def test_heads_without_attention_are_described_all_the_same() -> None:
    """Of layers that show neither a pattern nor scores; nothing is said of their attention."""
    model, tokens = tp.load_demo_model(), tp.demo_tokens(length=65)[:, 1:].view(2, 32)
    subject = read_subject(model, tokens)
    blind = [replace(spec, taps=replace(spec.taps, pattern=None, scores=None)) for spec in subject.specs]
    attention, reasons = _attention(subject, blind, subject.pairs)
    assert (len(attention), reasons) == (0, {})
    table = tp.additivity(model, tokens, layers=[2], progress=False)
    says = describe_heads(None, Measurement(table), None, attention)
    assert [*says] == [(2, head) for head in range(8)]
    assert not [x for sentences in says.values() for x in sentences if "attention" in x]
