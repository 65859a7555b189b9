"""A report of a large model runs some of its heads and estimates the others; a section that fails leaves the others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support import zoo
from support.documents import Document, as_number

import tl_posdisent as tp
from tl_posdisent.page import every_head, measurements
from tl_posdisent.page.measurements import narrowed
from tl_posdisent.page.subject import read_subject

HEAD = ["layer", "head"]
LONGER = tp.demo_tokens(length=513)[:, 1:].view(2, 256)
TOKENS = tp.demo_tokens(length=97)[:, 1:].view(2, 48)
OPTIONS: Any = {"control": 0, "seed": 5, "progress": False}


def said(document: Document) -> str:
    return " ".join(document.text.split())


@pytest.fixture(scope="module")
def estimated(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """A report of which the budget is for no head."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(every_head, "BUDGET", 1.0)
        patch.setattr(every_head, "LEAST", 16)
        path = tmp_path_factory.mktemp("report") / "r.html"
        sections: Any = ["additivity", "distance", "labels", "ablation", "ladder"]
        return Document(tp.report(tp.load_demo_model(), LONGER, path, sections=sections, **OPTIONS))


def run_in(document: Document, section: str) -> list[str]:
    """The heads that a section lists as run."""
    folded = document.source.split(f'<section id="{section}">')[1].split("The heads that were run</summary>")[1]
    return re.findall(r"L\dH\d", folded.split("</details>")[0])


def test_what_is_estimated_is_marked(estimated: Document) -> None:
    """In the atlas and in the table of ablation; the ladder has rows of the heads that were run, and of no others."""
    assert estimated.wrong == []
    rows = estimated.rows("atlas")
    assert len(rows) == 40
    run = run_in(estimated, "ablation")
    assert 16 <= len(run) <= 16 + 5
    for row in rows:
        assert ("≈" in row["added loss"]) == (row["head"] not in run)
        assert "–" not in (row["added loss"], row["looks at"])
        assert (row["KL"] == "–") == (row["verdict"] == "–")
    exact = {row["head"]: row["exact or estimated"] for row in estimated.rows("heads-ablation")}
    assert exact == {head: "exact" if head in run else "estimated" for head in exact}
    assert set(exact.values()) == {"exact", "estimated"}
    assert sum(row["KL"] != "–" for row in rows) == 16
    assert "Numbers and verdicts marked ≈ are estimates from gradients" in said(estimated)


def test_added_losses_are_those_of_head_effects(estimated: Document) -> None:
    model, tokens = tp.load_demo_model(), LONGER[:, :96]
    zero = {"zero": tp.ablate_heads(model, None)}
    options: dict[str, Any] = {"exact": 4, "draws": every_head.DRAWS, "seed": 5, "progress": False}
    effects = tp.head_effects(model, tokens, zero, **options)
    expected = effects["exact"].fillna(effects["estimate"])
    for table in ("heads-ablation", "atlas"):
        shown = [as_number(row["added loss"].removeprefix("≈\u00a0")) for row in estimated.rows(table)]
        assert shown == pytest.approx(expected.tolist(), abs=6e-5)
    labels = effects["layer"].map("L{}".format) + effects["head"].map("H{}".format)
    run = run_in(estimated, "ablation")
    assert run == labels[effects["exact"].notna()].tolist()
    values = tp.head_ablation(model, tokens, heads=run, progress=False)
    shown = [as_number(r["loss without it"]) for r in estimated.rows("heads-ablation") if r["head"] in run]
    assert shown == pytest.approx(values["value"].tolist(), abs=6e-5)
    stated = effects.attrs["runs"]["zero"]["statement"]
    assert stated.startswith(f"{len(run)} of 40 heads were run: ")
    assert f"{stated}. The numbers of the others are estimated" in said(estimated)


@pytest.mark.filterwarnings("ignore:a static head's direction")
def test_the_ladder_is_that_of_the_heads_with_the_largest_added_loss(
    estimated: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(every_head, "BUDGET", 1.0)
    monkeypatch.setattr(every_head, "LEAST", 16)
    model, part = tp.load_demo_model(), LONGER[:, :128]
    effects = every_head.ablation(narrowed("ladder", read_subject(model, LONGER, None, None, None)), 5, progress=False)
    largest = effects.sort_values("effect", ascending=False).head(16)
    heads = sorted(zip(largest["layer"], largest["head"], strict=True))
    options: Any = {"rungs": every_head.LADDER, "controls": [], "progress": False, "heads": heads}
    verdicts = tp.head_verdicts(tp.attention_ladder(model, part[:1], heldout=part[1:], **options)).set_index(HEAD)
    shown = {row["head"]: row for row in estimated.rows("atlas") if row["KL"] != "–"}
    assert list(shown) == [f"L{layer}H{head}" for layer, head in heads]
    for row, (_, expected) in zip(shown.values(), verdicts.iterrows(), strict=True):
        assert as_number(row["KL"]) == pytest.approx(expected["gap_mean"], abs=6e-5)
        assert row["verdict"] == expected["verdict"]
        assert row["undecided between"].replace("–", "") == expected["between"]
    assert "Measured for 16 of 40 heads: those with the largest added loss when ablated." in said(estimated)


def test_sentences_say_how_many_heads_were_run(estimated: Document) -> None:
    verdict = estimated.source.split('<section id="verdict">')[1].split("</section>")[0]
    lead, more = verdict.split("<details>")
    run = len(run_in(estimated, "ablation"))
    assert re.findall("; estimated for all but ([0-9]+) heads", lead) == [str(run)]
    assert f"{run} of 40 heads were run: " in more
    assert "The numbers of the others are estimated from gradients." in verdict
    assert "of 16 heads" in " ".join(lead.split())  # those of the ladder


@pytest.mark.parametrize("n", [16, 18, 39, 40])
def test_the_budget_is_for_so_many_heads(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer takes a run of its own; whatever the budget, eight heads are run, and of all heads none together."""
    subject = narrowed("ablation", read_subject(tp.load_demo_model(), TOKENS, None, None, None))
    each = every_head.PASSES["ablation"] * subject.n_parameters * 96
    monkeypatch.setattr(every_head, "BUDGET", 1.01 * each * n)
    assert every_head.affordable("ablation", subject) == n
    table = every_head.ablation(subject, 0, progress=False)
    n_run, most = table["exact"].sum(), max(every_head.LEAST, n - 5)
    assert n_run == 40 if n == 40 else every_head.LEAST <= n_run <= most + 5
    assert table[["value", "effect"]].notna().all(axis=None)
    assert table["value"].tolist() == pytest.approx((table["baseline"] + table["effect"]).tolist())
    whole = tp.head_ablation(tp.load_demo_model(), TOKENS, progress=False)
    assert table["baseline"].tolist() == pytest.approx(whole["baseline"].tolist(), rel=1e-6)
    exact = table["exact"]
    assert table["effect"][exact].tolist() == pytest.approx(whole["effect"][exact].tolist(), abs=2e-6)
    if n < 40:
        assert table.attrs["search"]["run"] == n_run


@pytest.mark.parametrize(("name", "sections"), [("bloom", ["ladder"])])
def test_what_cannot_be_run_cannot_be_estimated(
    name: str, sections: Any, tmp_path: Path, shared_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is refused whole, is refused with the same reason if its heads are estimated."""
    model, texts = shared_model("bridge", name), zoo.random_tokens(length=24, batch=4)
    reasons = []
    for least in (16, 4):  # all heads, and a few
        monkeypatch.setattr(every_head, "LEAST", least)
        monkeypatch.setattr(every_head, "BUDGET", 1.0)
        path = tp.report(model, texts, tmp_path / "r.html", sections=["additivity", *sections], **OPTIONS)
        reasons.append(re.findall(r"Not for this model.</strong> (?:ValueError: )?(.*?)</p>", path.read_text()))
    assert len(reasons[0]) == len(sections)
    assert reasons[0] == reasons[1]


def test_small_models_are_measured_whole() -> None:
    subject = read_subject(tp.load_demo_model(), tp.demo_tokens(length=1024).view(2, 512), None, None, None)
    for name, length in (("ablation", 96), ("ladder", 128)):
        part = narrowed(name, subject)
        assert every_head.affordable(name, part) == 40
        assert part.lengths == [length, length]


@pytest.mark.usefixtures("unchecked")
def test_each_section_says_what_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tp.load_demo_model()
    monkeypatch.setitem(measurements.READ, "ablation", (16, 20))
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
    monkeypatch.setattr(every_head, "head_ablation", fail)
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
    with (
        pytest.warns(UserWarning, match="RuntimeError"),
        pytest.raises(ValueError, match=r"none of the requested .*: RuntimeError"),
    ):
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
        monkeypatch.setattr(every_head, name, without_second(getattr(every_head, name)))
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
