"""A report of a large model measures some of its heads and says which; one that fails leaves the others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.documents import Document, as_number

import tl_posdisent as tp
from tl_posdisent.report import measurements
from tl_posdisent.report import measurements as sample
from tl_posdisent.report.measurements import narrowed, read_subject

TOKENS = tp.demo_tokens(length=97)[:, 1:].view(2, 48)
OPTIONS: Any = {"control": 0, "seed": 5, "progress": False}


def said(document: Document) -> str:
    return " ".join(document.text.split())


@pytest.mark.usefixtures("unchecked")
def test_a_sample_is_named_and_its_numbers_are_those_of_its_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tp.load_demo_model()
    monkeypatch.setattr(sample, "BUDGET", 1.0)
    path = tp.report(model, TOKENS, tmp_path / "r.html", sections=["ablation", "ladder"], **OPTIONS)
    document = Document(path)
    assert document.wrong == []
    text = said(document)
    assert text.count("Measured on 12 of the 40 heads, drawn from all layers with seed 5.") == 2
    lists = [re.findall(r"L\dH\d", part) for part in document.source.split("The heads measured</summary>")[1:]]
    ablated, climbed = (list(dict.fromkeys(part[:12])) for part in lists)
    assert len(ablated) == len(climbed) == 12
    assert [row["head"] for row in document.rows("heads-ablation")] == ablated
    drops = tp.head_ablation(model, TOKENS, heads=ablated, progress=False)
    shown = [as_number(row["loss without it"]) for row in document.rows("heads-ablation")]
    assert shown == pytest.approx(drops["value"].tolist(), abs=6e-5)
    assert sum(int((~np.isnan(trace["z"].astype(float))).sum()) for trace in document.drawn("Verdict by head")) == 12
    sentences = re.findall(r"<li>(.*?)</li>", document.source.split('<section id="verdict">')[1].split("</section>")[0])
    assert [re.search(r'href="#(\w+)"', each)[1] for each in (sentences[0], sentences[-1])] == ["ladder", "ablation"]  # type: ignore[index]
    assert all("12 of the 40 heads were measured" in sentence for sentence in sentences)


@pytest.mark.parametrize("n", [1, 3, 5, 12, 39])
def test_drawn_heads_are_spread_over_layers_and_follow_the_seed(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "BUDGET", 0.0)
    monkeypatch.setattr(sample, "LEAST", n)
    subject = read_subject(tp.load_demo_model(), TOKENS, None, None, None)
    samples = [narrowed("ablation", subject, seed).pairs for seed in (0, 0, 1)]
    assert samples[0] == samples[1]
    assert samples[0] != samples[2] or n == 39
    for pairs in samples:
        assert len(set(pairs)) == n
        assert set(pairs) <= set(subject.pairs)
        sizes = pd.Series([layer for layer, _ in pairs]).value_counts()
        assert len(sizes) == min(n, 5)
        assert sizes.max() - sizes.min() <= 1
    assert narrowed("shares", subject, 0).pairs == subject.pairs


def test_small_models_are_measured_whole() -> None:
    subject = read_subject(tp.load_demo_model(), tp.demo_tokens(length=1024).view(2, 512), None, None, None)
    for name in measurements.SECTIONS:
        part = narrowed(name, subject, 0)
        assert (part.pairs, part.sample) == (subject.pairs, "")


@pytest.mark.usefixtures("unchecked")
def test_each_section_says_what_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tp.load_demo_model()
    monkeypatch.setitem(sample.READ, "ablation", (16, 20))
    document = Document(
        tp.report(model, TOKENS, tmp_path / "r.html", sections=["additivity", "ablation"], layers=[3], **OPTIONS)
    )
    reads = re.findall(r'<p class="read">(.*?)</p>', document.source)
    assert reads == ["Read: 2 texts of 48 tokens.", "Read: 1 text of 16 tokens, of 2 texts of 48 tokens."]
    drops = tp.head_ablation(model, TOKENS[:1, :16], layers=[3], progress=False)
    shown = [as_number(row["loss without it"]) for row in document.rows("heads-ablation")]
    assert shown == pytest.approx(drops["value"].tolist(), abs=6e-5)


@pytest.mark.usefixtures("unchecked")
def test_a_section_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> pd.DataFrame:
        raise RuntimeError("out of <memory>")

    model = tp.load_demo_model()
    monkeypatch.setattr(measurements, "head_ablation", fail)
    options = OPTIONS | {"layers": [4], "sections": ["additivity", "ablation"]}
    with pytest.warns(UserWarning, match="the section ablation could not be measured: RuntimeError: out of"):
        document = Document(tp.report(model, TOKENS, tmp_path / "r.html", **options))
    assert document.wrong == []
    assert "Not measured. RuntimeError: out of <memory>" in said(document)
    assert len(document.rows("heads-r")) == 8
    monkeypatch.setattr(measurements, "head_labels", fail)
    with pytest.warns(UserWarning, match="the section labels could not be measured"):
        document = Document(
            tp.report(model, TOKENS, tmp_path / "r.html", **options | {"sections": ["additivity", "labels"]})
        )
    assert [set(row) & {"label", "looks at"} for row in document.rows("atlas")] == [{"looks at"}] * 8
    assert "label:" not in document.source.split("customdata")[1].split("</script>")[0]
    options |= {"sections": ["ablation"]}
    with pytest.warns(UserWarning, match="RuntimeError"), pytest.raises(ValueError, match=r"nothing .*: RuntimeError"):
        tp.report(model, TOKENS, tmp_path / "none.html", **options)

    monkeypatch.undo()
    shares = measurements._MEASUREMENTS["shares"]
    monkeypatch.setitem(
        measurements._MEASUREMENTS,
        "shares",
        lambda subject, seed: shares(subject, seed) if subject.model is model else fail(),
    )
    options |= {"sections": ["shares"], "control": 1}
    document = Document(tp.report(model, TOKENS, tmp_path / "r.html", **options))
    assert "Not measured with random weights of seed 5: RuntimeError: out of <memory>." in said(document)
    assert len(document.rows("heads-shares")) == 8


@pytest.mark.usefixtures("unchecked")
def test_a_head_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a row without a number, or no verdict; the page says why."""

    def without_second(experiment: Any) -> Any:
        def measure(*args: Any, **options: Any) -> pd.DataFrame:
            table: pd.DataFrame = experiment(*args, **options)
            columns = [
                name
                for name in ("value", "effect", "loss", "recovered", "error", "kl", "recovered_kl")
                if name in table
            ]
            table.loc[table["head"] == 1, columns] = float("nan")
            table.attrs["failures"] = {"L1H1": "RuntimeError: not <finite>"}
            return table

        return measure

    for name in ("head_ablation", "attention_ladder"):
        monkeypatch.setattr(measurements, name, without_second(getattr(measurements, name)))
    options = OPTIONS | {"layers": [1], "sections": ["ablation", "ladder"]}
    document = Document(tp.report(tp.load_demo_model(), TOKENS, tmp_path / "r.html", **options))
    assert document.wrong == []
    assert said(document).count("Not measured: L1H1: RuntimeError: not <finite>.") == 2
    rows = {row["head"]: row["loss without it"] for row in document.rows("heads-ablation")}
    assert len(rows) == 8
    assert rows["L1H1"] == "–"
    assert "nats per token; of 7 heads, " in said(document)
    assert "of 7 heads the predictions surely diverge by more than 0.001 nats" in said(document)
    assert "L1H1" not in {row["head"] for row in document.rows("ladder")}
