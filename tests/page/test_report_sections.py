"""Sections: what each of them read, layers with sliding windows, what fails leaves the others, one reading."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support import zoo
from support.documents import Document, as_number, decoded

import tl_posdisent as tp
from tl_posdisent import page
from tl_posdisent.models.reading import model_reading
from tl_posdisent.page.subject import read_subject

TOKENS = tp.demo_tokens(length=97)[:, 1:].view(2, 48)
OPTIONS: Any = {"control": 0, "seed": 5, "progress": False}
KINDS = {0: "local, 5", 1: "local, 5", 2: "global"}


def said(document: Document) -> str:
    return " ".join(document.text.split())


def test_layers_with_windows_are_told_apart(tmp_path: Path) -> None:
    """A toy Gemma 3: layers 0 and 1 see 5 tokens, layer 2 sees all. Scores outside of a window are not shown."""
    model, tokens = zoo.bridge("gemma3"), zoo.random_tokens(length=24, batch=2)
    sections: Any = ["additivity", "distance", "shares", "labels"]
    document = Document(tp.report(model, tokens, tmp_path / "r.html", sections=sections, **OPTIONS))
    assert document.wrong == []
    for name in ("atlas", "additivity", "shares", "labels"):
        rows = document.rows(name)
        assert len(rows) in (3, 24), name
        for row in rows:
            layer = int(row["layer"] if "layer" in row else re.findall(r"\d+", row["head"])[0])
            assert row["attention"] == KINDS[layer], name
    data = document.data["atlas-data"]
    assert data["layers"] == {str(layer): f"{kind} · {layer}" for layer, kind in KINDS.items()}
    assert "sliding windows: layers 0, 1, of 5 tokens, the query’s own included" in said(document)
    windowed = [row for row in document.rows("atlas") if "\u2002" in row["profile"]]
    assert 0 < len(windowed) < 24  # a blank at distances without keys
    masks = {spec.layer: spec.mask(24).numpy() for spec in tp.read_model(model).attention}
    assert min(mask.sum() for mask in masks.values()) < max(mask.sum() for mask in masks.values())
    for label, one in data["panels"].items():
        found = decoded(one["scores"], 24, causal=True)
        assert ((found == found) == masks[int(label[1 : label.index("H")])]).all()  # NaN where it is masked


def test_a_model_without_windows_has_no_such_column(tmp_path: Path) -> None:
    options = OPTIONS | {"sections": ["additivity"], "layers": [1]}
    path = tp.report(tp.load_demo_model(), TOKENS[:, :16], tmp_path / "r.html", **options)
    assert "attention" not in Document(path).rows("atlas")[0]
    assert "sliding windows: none" in Document(path).text


def test_each_section_says_what_it_read(tmp_path: Path) -> None:
    model, tokens = tp.load_demo_model(), tp.demo_tokens(length=289)[:, 1:].view(2, 144)
    options = OPTIONS | {"sections": ["additivity", "ablation"], "layers": [3], "heads": [1, 6]}
    document = Document(tp.report(model, tokens, tmp_path / "r.html", **options))
    reads = re.findall(r"<p>(Read: .*?)</p>", document.source)
    assert reads == ["Read: 2 texts of 144 tokens.", "Read: 2 texts of 96 tokens, of 2 texts of 144 tokens."]
    drops = tp.head_ablation(model, tokens[:, :96], layers=[3], heads=[1, 6], progress=False)
    shown = [as_number(row["added loss"]) for row in document.rows("atlas")]
    assert shown == pytest.approx(drops["effect"].tolist(), abs=6e-5)


@pytest.mark.usefixtures("unchecked")
def test_a_section_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> pd.DataFrame:
        raise RuntimeError("out of <memory>")

    model = tp.load_demo_model()
    monkeypatch.setattr(page.sections, "head_ablation", fail)
    options = OPTIONS | {"layers": [4], "sections": ["additivity", "ablation"]}
    with pytest.warns(UserWarning, match="report were not measured: ablation: RuntimeError: out of"):
        document = Document(tp.report(model, TOKENS, tmp_path / "r.html", **options))
    assert document.wrong == []
    assert "Not measured: RuntimeError: out of <memory>" in said(document)
    assert len(document.rows("atlas")) == 8
    assert "added loss" not in document.rows("atlas")[0]
    options |= {"sections": ["ablation"]}
    with pytest.raises(ValueError, match=r"none of the requested .*: RuntimeError"):
        tp.report(model, TOKENS, tmp_path / "none.html", **options)

    measure = page.sections.controlled_distance
    monkeypatch.setattr(
        page.sections,
        "controlled_distance",
        lambda reading, *args, **kwargs: measure(reading, *args, **kwargs) if reading.model is model else fail(),
    )
    options |= {"sections": ["shares"], "control": 1}
    document = Document(tp.report(model, TOKENS, tmp_path / "r.html", **options))
    assert "Not measured with random weights of seed 5: RuntimeError: out of <memory>." in said(document)
    assert len(document.rows("shares")) == 1


def test_sections_that_are_not_measured_are_warned_of(tmp_path: Path) -> None:
    """Once, with the reason, at the user's line: here of a text that makes one text alone."""
    options: Any = OPTIONS | {"layers": [0], "sections": ["where_or_what", "additivity"]}
    with pytest.warns(UserWarning, match="not measured") as caught:
        tp.report(tp.load_demo_model(), tp.demo_text()[:150], tmp_path / "r.html", **options)
    (warning,) = [x for x in caught if "not measured" in str(x.message)]
    begin = "sections of the report were not measured: where_or_what: tokens must be at least two texts"
    assert str(warning.message).startswith(begin)
    assert warning.filename == __file__


@pytest.mark.usefixtures("unchecked")
def test_a_head_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a row without a number; the page says why."""
    experiment = page.sections.head_ablation

    def without_second(*args: Any, **options: Any) -> pd.DataFrame:
        table: pd.DataFrame = experiment(*args, **options)
        table.loc[table["head"] == 1, ["value", "effect"]] = float("nan")
        table.attrs["failures"] = {"L1H1": "RuntimeError: not <finite>"}
        return table

    monkeypatch.setattr(page.sections, "head_ablation", without_second)
    options = OPTIONS | {"layers": [1], "sections": ["ablation"]}
    document = Document(tp.report(tp.load_demo_model(), TOKENS, tmp_path / "r.html", **options))
    assert document.wrong == []
    assert "Not measured: L1H1: RuntimeError: not <finite>." in said(document)
    rows = {row["head"]: row["added loss"] for row in document.rows("atlas")}
    assert [head for head, loss in rows.items() if loss == "–"] == ["L1H1"]
    assert document.data["atlas-data"]["colours"]["effect"]["values"][1] is None
    assert "Ablating L1H" in said(document)


def test_a_report_reads_its_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    described = model_reading._described
    monkeypatch.setattr(model_reading, "_described", lambda layer: read.append(layer.number) or described(layer))
    options = OPTIONS | {"sections": ["additivity", "distance", "shares", "ablation"], "heads": [2]}
    tp.report(tp.load_demo_model(), TOKENS[:, :16], tmp_path / "r.html", **options)
    assert sorted(read) == [0, 1, 2, 3, 4]


def test_a_model_from_a_folder_has_its_name(tmp_path: Path) -> None:
    (tmp_path / "Some-1B").mkdir()
    for backend in ("bridge", "hooked") if zoo.TL_MAJOR < 4 else ("bridge",):
        model: Any = tp.load_demo_model(backend=backend)  # type: ignore[arg-type]
        subject = read_subject(model, tp.demo_tokens(length=8))
        model.cfg.model_name, model.tokenizer.name_or_path = "custom", str(tmp_path / "Some-1B")
        assert subject.name() == "Some-1B"
