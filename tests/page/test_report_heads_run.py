"""Sections that run the model for each head run a fixed number of heads; a section that fails leaves the others."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support import zoo
from support.documents import Document, as_number

import tl_posdisent as tp
from tl_posdisent.page.measuring import heads_to_run
from tl_posdisent.page.measuring.subject import read_subject
from tl_posdisent.page.sections import ablation, labels, ladder, shares

HEAD = ["layer", "head"]
LONGER = tp.demo_tokens(length=289)[:, 1:].view(2, 144)
TOKENS = tp.demo_tokens(length=97)[:, 1:].view(2, 48)
OPTIONS: Any = {"control": 0, "seed": 5, "progress": False}
RUN = [f"L{place // 8}H{place % 8}" for place in (0, 13, 26, 39)]
"""Four of forty heads at equal steps."""


def said(document: Document) -> str:
    return " ".join(document.text.split())


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """A report that runs four heads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads_to_run, "MOST_HEADS", 4)
        path = tmp_path_factory.mktemp("report") / "r.html"
        sections: Any = ["additivity", "distance", "labels", "ablation", "ladder"]
        return Document(tp.report(tp.load_demo_model(), LONGER, path, sections=sections, **OPTIONS))


def test_all_heads_are_run_or_forty_at_equal_steps() -> None:
    subject = read_subject(tp.load_demo_model(), TOKENS)
    assert heads_to_run.heads_to_run(subject) == subject.pairs
    assert heads_to_run.sample_size(subject) is heads_to_run.sample_note(subject) is None
    for n_layers, n_heads in ((6, 7), (12, 12), (30, 9), (24, 16), (80, 64)):
        large = replace(subject, heads={layer: list(range(n_heads)) for layer in range(n_layers)})
        run = heads_to_run.heads_to_run(large)
        assert len(set(run)) == 40
        assert (run[0], run[-1]) == (large.pairs[0], large.pairs[-1])
        steps = np.diff([n_heads * layer + head for layer, head in run])
        assert set(steps) <= {int((n_layers * n_heads - 1) / 39), int((n_layers * n_heads - 1) / 39) + 1}
        assert heads_to_run.sample_size(large) == f"40 of {n_layers * n_heads} heads"
        assert f"40 of {n_layers * n_heads} heads at equal steps" in heads_to_run.sample_note(large)
        listed = heads_to_run.sample_list(large).split(": ")[1].split(". ")[0]
        assert listed.split(", ") == [f"L{layer}H{head}" for layer, head in run]


def test_heads_that_are_not_run_have_no_numbers(sampled: Document) -> None:
    """They are not in the tables of the two sections, have dashes in the atlas, and are grey and crossed in maps."""
    assert sampled.wrong == []
    assert [row["head"] for row in sampled.rows("heads-ablation")] == RUN
    assert {row["head"] for row in sampled.rows("ladder")} <= set(RUN)
    rows = sampled.rows("atlas")
    assert len(rows) == 40
    for row in rows:
        for title in ("added loss", "ladder"):
            assert (row[title] != "–") == (row["head"] in RUN)
        assert row["held-out r"] != "–"
    for caption in ("Added loss without the head", "Verdict by head", "Gap"):
        heat, crosses = sampled.drawn(caption)
        assert np.isfinite(heat["z"]).sum() == 4
        assert len(crosses["x"]) == 36


def test_numbers_of_the_heads_that_are_run_are_those_of_the_experiments(sampled: Document) -> None:
    model = tp.load_demo_model()
    effects = tp.head_ablation(model, LONGER[:, :96], heads=RUN, progress=False)["effect"]
    for table in ("heads-ablation", "atlas"):
        shown = [as_number(row["added loss"]) for row in sampled.rows(table) if row["head"] in RUN]
        assert shown == pytest.approx(effects.tolist(), abs=6e-5)
    options: Any = {"rungs": ladder.MEASURED_RUNGS, "controls": [], "progress": False, "heads": RUN}
    rungs = tp.attention_ladder(model, LONGER[:1, :128], heldout=LONGER[1:, :128], **options)
    rows = [row for row in sampled.rows("atlas") if row["head"] in RUN]
    for row, (_, expected) in zip(rows, tp.head_verdicts(rungs).iterrows(), strict=True):
        assert row["ladder"] == expected["verdict"]
        assert row["undecided between"].replace("–", "") == expected["between"]


def test_the_page_says_which_heads_were_run(sampled: Document) -> None:
    """Once in a list, and their number in both sections and in their sentences of the verdict."""
    assert said(sampled).count(", ".join(RUN)) == 1
    assert f"Heads of ablation and ladder4 of 40 heads at equal steps: {', '.join(RUN)}. Select other" in said(sampled)
    assert said(sampled).count("Measured for 4 of 40 heads at equal steps, which are listed under “What was") == 2
    verdict = " ".join(sampled.source.split('<section id="verdict">')[1].split("</section>")[0].split())
    assert re.search(r"The predictions depend on (none|\d+) of 4 heads", verdict)
    largest = sampled.rows("ablation")[0]["head"]
    assert f"Among 4 of 40 heads at equal steps, ablating {largest} raises the loss most" in verdict
    for name, texts in (("ladder", "2 texts of 128 tokens"), ("ablation", "2 texts of 96 tokens")):
        assert f'(<a href="#{name}">{name}</a>, {texts}, 4 of 40 heads)' in verdict


def test_a_model_that_cannot_be_run_is_refused(tmp_path: Path, shared_model: Any) -> None:
    model, texts = shared_model("bridge", "bloom"), zoo.random_tokens(length=24, batch=4)
    path = tp.report(model, texts, tmp_path / "r.html", sections=["additivity", "ladder"], **OPTIONS)
    (reason,) = re.findall(r"Not for this model.</strong> (.*?)</p>", path.read_text())
    assert reason


@pytest.mark.usefixtures("unchecked")
def test_each_section_says_what_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tp.load_demo_model()
    monkeypatch.setattr(ablation, "_POSITIONS", 16)
    monkeypatch.setattr(ablation, "_TOKENS", 20)
    document = Document(
        tp.report(model, TOKENS, tmp_path / "r.html", sections=["additivity", "ablation"], layers=[3], **OPTIONS)
    )
    reads = re.findall(r"<p>(Read: .*?)</p>", document.source)
    assert reads == ["Read: 2 texts of 48 tokens.", "Read: 1 text of 16 tokens, of 2 texts of 48 tokens."]
    drops = tp.head_ablation(model, TOKENS[:1, :16], layers=[3], progress=False)
    shown = [as_number(row["loss without it"]) for row in document.rows("heads-ablation")]
    assert shown == pytest.approx(drops["value"].tolist(), abs=6e-5)


@pytest.mark.usefixtures("unchecked")
def test_a_section_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> pd.DataFrame:
        raise RuntimeError("out of <memory>")

    model = tp.load_demo_model()
    monkeypatch.setattr(ablation, "head_ablation", fail)
    options = OPTIONS | {"layers": [4], "sections": ["additivity", "ablation"]}
    with pytest.warns(UserWarning, match="the section ablation could not be measured: RuntimeError: out of"):
        document = Document(tp.report(model, TOKENS, tmp_path / "r.html", **options))
    assert document.wrong == []
    assert "Not measured. RuntimeError: out of <memory>" in said(document)
    assert len(document.rows("heads-r")) == 8
    monkeypatch.setattr(labels, "head_labels", fail)
    with pytest.warns(UserWarning, match="the section labels could not be measured"):
        document = Document(
            tp.report(model, TOKENS, tmp_path / "r.html", **options | {"sections": ["additivity", "labels"]})
        )
    assert [set(row) & {"label", "key alone"} for row in document.rows("atlas")] == [{"key alone"}] * 8
    assert "label:" not in document.source.split("customdata")[1].split("</script>")[0]
    options |= {"sections": ["ablation"]}
    with (
        pytest.warns(UserWarning, match="RuntimeError"),
        pytest.raises(ValueError, match=r"none of the requested .*: RuntimeError"),
    ):
        tp.report(model, TOKENS, tmp_path / "none.html", **options)

    monkeypatch.undo()
    measure = shares.controlled_distance
    monkeypatch.setattr(
        shares,
        "controlled_distance",
        lambda reading, *args, **kwargs: measure(reading, *args, **kwargs) if reading.model is model else fail(),
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

    monkeypatch.setattr(ablation, "head_ablation", without_second(ablation.head_ablation))
    monkeypatch.setattr(ladder, "attention_ladder", without_second(ladder.attention_ladder))
    options = OPTIONS | {"layers": [1], "sections": ["ablation", "ladder"]}
    document = Document(tp.report(tp.load_demo_model(), TOKENS, tmp_path / "r.html", **options))
    assert document.wrong == []
    assert said(document).count("Not measured: L1H1: RuntimeError: not <finite>.") == 2
    rows = {row["head"]: row["loss without it"] for row in document.rows("heads-ablation")}
    assert len(rows) == 8
    assert rows["L1H1"] == "–"
    assert "Ablating L1H" in said(document)
    assert re.search(r"The predictions depend on \w+ of 7 heads[^,]*, by more than 0.001 nats", said(document))
    assert "L1H1" not in {row["head"] for row in document.rows("ladder")}
