"""A report of two models says what ``compare_heads`` says, and draws each head in both."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import zoo
from support.documents import Document, as_number

import tl_posdisent as tp

TOKENS = tp.demo_tokens(length=289)[:, 1:].view(6, 48)
OPTIONS: dict[str, Any] = {"layers": [3], "control": 0, "progress": False}


def weaker(model: Any) -> Any:
    """A copy of which L3H0 writes less."""
    after = copy.deepcopy(model)
    with torch.no_grad():
        after.blocks[3].attn.W_O[0].mul_(0.3)
    return after


@pytest.mark.slow
def test_the_section_says_what_the_comparison_says(tmp_path: Path) -> None:
    before = tp.load_demo_model(backend="bridge")
    after = weaker(before)
    sections: Any = ["where_or_what"]
    path = tp.report(before, TOKENS, tmp_path / "r.html", after=after, sections=sections, **OPTIONS)
    document = Document(path)
    assert document.wrong == []
    assert set(document.hashes) == document.allowed
    table = tp.compare_heads(before, after, TOKENS, layers=[3], progress=False)
    assert table.attrs["statement"] in " ".join(document.text.split())
    ids = [str(found["id"]) for tag, found in document.attributes if tag == "section"]
    assert ids == ["where_or_what", "two_models", "atlas", "reproduce"]
    assert "report(model, tokens, 'r.html', after=after, layers=[3], sections=['where_or_what'], " in document.text

    changed = table[table["changed"] != ""].sort_values("contribution_change", key=abs, ascending=False)
    rows = document.rows("two_models")
    assert [row["head"] for row in rows] == [f"L3H{head}" for head in changed["head"]]
    assert rows[0]["head"] == "L3H0"
    links = [found["href"] for tag, found in document.attributes if tag == "a" and "id" not in found]
    assert [link for link in links if str(link).startswith("#L")] == [f"#L3H{head}" for head in changed["head"]]
    assert [row["changed"] for row in rows] == changed["changed"].tolist()
    for title, name in (
        ("contribution change", "contribution_change"),
        ("error of where change", "where_part_change_se"),
    ):
        assert [as_number(row[title]) for row in rows] == pytest.approx(changed[name].tolist(), abs=5.1e-4)
    assert [row["same weights"] == "yes" for row in rows] == changed["same_weights"].tolist()

    traces = document.drawn("before, and arrows")
    drawn = {
        label: (x, y)
        for trace in traces
        for (label, *_), x, y in zip(trace.get("customdata", ()), trace["x"], trace["y"], strict=False)
    }
    places = {f"L3H{row.head}": row for row in table.itertuples()}
    assert drawn.keys() == places.keys()
    for label, row in places.items():
        assert drawn[label] == pytest.approx((row.where_part_before, row.what_part_before))
    (arrows,) = (trace for trace in traces if trace["name"] == "after")
    ends = np.stack([arrows["x"], arrows["y"]], 1).reshape(-1, 3, 2)[:, 1]
    assert len(ends) > 0
    after_places = table[["where_part_after", "what_part_after"]].to_numpy()
    assert all(np.abs(after_places - end).max(1).min() < 1e-9 for end in ends)


@pytest.mark.slow
def test_equal_models_have_no_heads_that_changed(tmp_path: Path) -> None:
    before = tp.load_demo_model()
    options: Any = OPTIONS | {"sections": ["additivity"], "heads": [0]}
    path = tp.report(before, TOKENS[:2, :16], tmp_path / "r.html", after=copy.deepcopy(before), **options)
    document = Document(path)
    assert "All weights of the two models are equal" in document.text
    assert "two_models" not in document.tables


@pytest.mark.usefixtures("unchecked")
def test_models_that_cannot_be_compared(tmp_path: Path) -> None:
    """What is no model is refused; of another architecture the section says so, and the others are measured."""
    before, tokens, options = tp.load_demo_model(), TOKENS[:2, :16], OPTIONS | {"sections": ["additivity"]}
    with pytest.raises(ValueError, match="after must be"):
        tp.report(before, tokens, tmp_path / "r.html", after=pd.DataFrame(), **options)
    assert [*tmp_path.iterdir()] == []
    other = zoo.bridge("llama")
    document = Document(tp.report(before, tokens, tmp_path / "r.html", after=other, **options))
    assert "Not measured: after must have the same" in document.text
    assert len(document.rows("atlas")) == 8
