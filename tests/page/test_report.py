"""The report says what the experiments say, and is one file that is valid, closed to the outside and whole."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import zoo
from support.documents import Document, as_number, decoded

import tl_posdisent as tp
from tl_posdisent.experiments.where_what.sentences import needs_sentences
from tl_posdisent.page.names import SECTION_NAMES
from tl_posdisent.page.sections import FRACTIONS
from tl_posdisent.page.words import unbroken

TOKENS = tp.demo_tokens(length=97)[:, 1:].view(2, 48)
OPTIONS: dict[str, Any] = {"layers": [2, 4], "progress": False}
"""Two layers have heads of each kind: some with a label, and some undecided."""
HEAD = ["layer", "head"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Document]:
    """A model, and the report of two of its layers with all sections."""
    model = tp.load_demo_model()
    path = tmp_path_factory.mktemp("report") / "new" / "report.html"
    assert tp.report(model, TOKENS, path, sections=SECTION_NAMES, control=2, seed=5, **OPTIONS) == path
    assert path.stat().st_size < 3_000_000
    return model, Document(path)


@pytest.fixture(scope="module")
def needs(made: tuple[Any, Document]) -> pd.DataFrame:
    """What the report's heads need, by the experiment alone; the heads that contribute most first."""
    table = tp.where_or_what(made[0], TOKENS, seed=5, **OPTIONS)
    return table.sort_values("contribution", ascending=False, kind="stable")


def column(document: Document, table: str, title: str) -> list[float]:
    return [as_number(row[title]) for row in document.rows(table)]


def labels(frame: pd.DataFrame) -> list[str]:
    return [f"L{layer:.0f}H{head:.0f}" for layer, head in zip(frame["layer"], frame["head"], strict=True)]


def agrees(document: Document, table: str, titles: dict[str, str], frame: pd.DataFrame, digits: int = 3) -> None:
    """All numbers of these columns are those of the frame, to the digits shown, and so are the heads."""
    if "head" in document.tables[table][0]:
        assert [row["head"] for row in document.rows(table)] == labels(frame)
    for title, name in titles.items():
        shown = column(document, table, title)
        assert shown == pytest.approx(frame[name].tolist(), abs=0.51 * 10**-digits, nan_ok=True), (table, title)
        assert any(shown), (table, title)


def over_texts(model: Any, **options: Any) -> pd.DataFrame:
    return tp.additivity(model, TOKENS, **OPTIONS | options).groupby(HEAD, as_index=False).mean()


def said(document: Document) -> str:
    return " ".join(document.text.split())


@pytest.mark.slow
def test_numbers_are_those_of_the_experiments(made: tuple[Any, Document], needs: pd.DataFrame) -> None:
    model, document = made
    copies = list(tp.random_control(model, [5, 6]))
    r = over_texts(model)
    random = pd.concat([over_texts(m) for m in copies]).groupby("layer").mean()
    columns = {"held-out r": "r_held_out", "distance alone": "share_distance", "key alone": "share_key", "r": "r"}
    agrees(document, "additivity", columns, r.groupby("layer").mean())
    agrees(document, "additivity", {f"random {title}": name for title, name in columns.items()}, random)
    in_order = needs[HEAD].merge(r, on=HEAD, how="left")
    agrees(document, "atlas", {title: name for title, name in columns.items() if title != "r"}, in_order)

    shares = tp.controlled_distance(model, TOKENS, **OPTIONS)
    random = pd.concat([tp.controlled_distance(m, TOKENS, **OPTIONS) for m in copies]).groupby("layer").mean()
    titles = {"r two axis": "r_two_axis", "r three axis": "r_three_axis"}
    agrees(document, "shares", {f"random {title}": name for title, name in titles.items()}, random)
    titles |= {e.replace(":", " × "): e for e in tp.rope.COMPONENTS}
    agrees(document, "shares", titles, shares.groupby("layer").mean())
    assert f"r of the two-axis model is {shares['r_two_axis'].mean():.2f} " in said(document)

    curve = tp.perturbation_curve(model, TOKENS, fractions=FRACTIONS, seeds=[5, 6], progress=False)
    draws = [tp.perturbation_curve(model, TOKENS, fractions=FRACTIONS, seeds=[n], progress=False) for n in (5, 6)]
    losses = np.stack([draw["added_loss"] for draw in draws])
    curve = curve.assign(lower=losses.min(0), higher=losses.max(0))
    titles = {"added loss": "added_loss", "lower of the draws": "lower", "higher of the draws": "higher", "KL": "kl"}
    agrees(document, "perturbation", titles, curve, 4)
    agrees(document, "perturbation", {"accuracy": "accuracy", "tokens moved": "moved"}, curve)

    drops = tp.head_ablation(model, TOKENS, **OPTIONS)
    agrees(document, "atlas", {"added loss": "effect"}, needs[HEAD].merge(drops, on=HEAD, how="left"), 4)


def test_every_error_says_over_what(made: tuple[Any, Document]) -> None:
    """Each sentence, title and caption with a ± says that it is a standard error, and over what."""
    _, document = made
    visible = re.sub(r"<(script|style).*?</\1>", "", document.source, flags=re.DOTALL)
    blocks = re.split(r"</(?:li|p|th|td|figcaption)>", visible)
    with_error = [" ".join(re.sub(r"<[^>]+>", "", block).split()) for block in blocks if "±" in block]
    assert len(with_error) >= 1
    assert [block for block in with_error if not re.search("standard error over (texts|copies)", block)] == []
    hovers = re.findall(r'"[^"]*±[^"]*"', "".join(str(figure).replace("'", '"') for figure in document.figures))
    hovers += document.data["atlas-data"]["hover"]
    assert [text for text in hovers if "standard error" not in text] == []


def test_no_sentence_is_printed_twice(made: tuple[Any, Document]) -> None:
    """But for what a section read."""
    _, document = made
    blocks = re.findall(r"<(p|li|dd|figcaption)\b[^>]*>(.*?)</\1>", document.source, flags=re.DOTALL)
    texts = [" ".join(re.sub(r"<[^>]+>", "", block).split()) for _, block in blocks]
    sentences = Counter(x for text in texts for x in re.findall(r"[^.;]{40,}[.;](?= |$)", text))
    assert len(sentences) > 40
    assert [x for x, count in sentences.items() if count > 1 and not x.startswith("Read: ")] == []


def test_distance_profiles_are_those_of_pooled_fits(made: tuple[Any, Document]) -> None:
    model, document = made
    lines = {line["name"]: line for line in document.drawn("Distance component") if line["name"].startswith("layer")}
    lines |= {line["hovertext"]: line for line in document.drawn("Distance component") if "other" in line["name"]}
    assert len(lines) == 16
    for layer in tp.capture(model, TOKENS, layers=OPTIONS["layers"]):
        for head, profile in enumerate(tp.fit_additive(layer.scores, pool=True).distance):
            line = lines[f"layer {layer.layer}, head {head}"]
            assert list(line["customdata"][:33]) == pytest.approx(range(33))  # beyond, means of several distances
            assert list(line["y"][:33]) == pytest.approx(profile[:33].tolist())


def test_figures_draw_the_numbers_of_their_tables(made: tuple[Any, Document], needs: pd.DataFrame) -> None:
    model, document = made
    drawn, atlas = document.data["atlas-data"]["colours"], {row["head"]: row for row in document.rows("atlas")}
    titles = {"held-out r, by": "held-out r", "Added loss without": "added loss"}
    for caption, title in titles.items():
        (heat,) = document.drawn(caption)
        expected = [as_number(atlas[f"L{layer}H{head}"][title]) for layer in OPTIONS["layers"] for head in range(8)]
        assert heat["z"].ravel() == pytest.approx(expected, abs=6e-4), caption
    assert drawn["effect"]["values"] == pytest.approx(column(document, "atlas", "added loss"), abs=6e-5)
    shares = tp.controlled_distance(model, TOKENS, **OPTIONS)
    for bars in document.drawn("Share of the variance"):
        assert list(bars["y"]) == pytest.approx(shares[bars["name"].replace(" × ", ":")].tolist()), bars["name"]
    rows = document.rows("perturbation")
    lines = [trace for trace in document.drawn("Added loss by perturbed") if "name" in trace]
    losses = [y for line in lines for y in line["y"]]
    assert losses == pytest.approx(column(document, "perturbation", "added loss"), abs=6e-5)
    assert [x for line in lines for x in line["x"]] == [as_number(row["fraction asked for"]) for row in rows]


def test_no_text_is_written_in_cells(made: tuple[Any, Document]) -> None:
    """No ink has enough contrast on all colours, in the light and in the dark, where figures are inverted."""
    _, document = made
    maps = [trace for figure in document.figures for trace in figure["data"] if trace["type"] == "heatmap"]
    assert len(maps) == 2
    assert not [trace for trace in maps if "text" in trace or "texttemplate" in trace]


def test_labels_are_those_of_head_labels(made: tuple[Any, Document]) -> None:
    """In the section, in the atlas, in the hover text, in the panels and in the sentence that counts them."""
    model, document = made
    table = tp.head_labels(model, TOKENS, seed=5, seeds=[5, 6], **OPTIONS)
    table["words"] = [label.replace("_", " ").replace("+", " + ") or "none" for label in table["label"]]
    by_head = dict(zip(labels(table), table["words"], strict=True))
    assert set(by_head.values()) > {"none"}
    rows, data = document.rows("atlas"), document.data["atlas-data"]
    assert {row["head"]: row["label"] for row in rows} == by_head
    hover = ["".join(re.findall("\nlabel: ([a-z +]+)", text)) for text in data["hover"]]
    assert hover == [row["label"] for row in rows]
    for head, words in by_head.items():
        (sentence,) = [x for x in data["panels"][head]["says"] if x.startswith("Usual label")]
        assert sentence.split(": ")[1] == words.replace(" + ", ", ") + "."
    ranked = table.sort_values("label", key=lambda label: label == "", kind="stable")
    assert [row["label"] for row in document.rows("labels")] == ranked["words"].tolist()
    measures = {
        name.replace("_", " "): name for name in table.columns if name.startswith(("prev", "ind", "loc", "ent"))
    }
    agrees(document, "labels", measures, ranked)
    named = [name for label in by_head.values() if label != "none" for name in label.split(" + ")]
    (counted,) = re.findall(
        r"(\d+) of 16 heads have a label, by the keys that they attend to: (.*?)[.;]", said(document)
    )
    assert int(counted[0]) == 16 - [*by_head.values()].count("none")
    assert sorted(counted[1].split(", ")) == sorted(f"{n} {name}" for name, n in Counter(named).items())


def test_what_heads_need_is_that_of_the_experiment(made: tuple[Any, Document], needs: pd.DataFrame) -> None:
    """In the table, which is sorted by contribution, in the plane, and in the map."""
    _, document = made
    parts = ("where_part", "what_part", "neither_part", "joint")
    titles = {name.removesuffix("_part"): name for name in parts}
    titles |= {f"error of {title}": f"{name}_se" for title, name in titles.items()} | {"kept by gate": "gate"}
    titles |= {f"kept by {name}": f"kept_{name}" for name in ("distance", "content", "uniform")}
    agrees(document, "atlas", titles, needs, 2)
    agrees(document, "atlas", {"contribution": "contribution", "error of contribution": "contribution_se"}, needs, 4)
    rows = document.rows("atlas")
    assert [row["verdict"] for row in rows] == needs["verdict"].tolist()
    assert [row["measured"] for row in rows] == needs["measured"].tolist()
    assert [row["open"] for row in rows] == needs["open"].tolist()
    points = [trace for trace in document.drawn("Parts of each head") if trace["name"] in set(needs["verdict"])]
    drawn = {
        label: (x, y)
        for trace in points
        for (label, *_), x, y in zip(trace["customdata"], trace["x"], trace["y"], strict=True)
    }
    for row, label in zip(needs.itertuples(), labels(needs), strict=True):
        assert drawn[label] == pytest.approx((row.where_part, row.what_part))
    data = document.data["atlas-data"]
    assert data["labels"] == labels(needs)
    first, verdicts = next(iter(data["colours"].items()))
    assert first == "verdict"
    assert [verdicts["names"][code] for code in verdicts["values"]] == needs["verdict"].tolist()
    assert "undecided" in set(needs["verdict"])


def test_no_line_ends_before_a_percent_sign(made: tuple[Any, Document]) -> None:
    """In sentences, and in what is said of how they were measured."""
    _, document = made
    assert "\xa0%" in document.text
    assert re.findall(r".{20}\d %", document.text) == []
    says = [" ".join(panel["says"]) for panel in document.data["atlas-data"]["panels"].values()]
    assert [text for text in says if re.search(r"\d %", text) or "\xa0%" not in text] == []


@pytest.mark.slow
def test_the_answer_is_the_statement_of_the_table(made: tuple[Any, Document], needs: pd.DataFrame) -> None:
    """But for its counts, which the table has; and says where the heads of random copies lie."""
    model, document = made
    answer = said(document).split("Where or what")[-1].split("Read:")[0].strip()
    used = needs[needs["verdict"] != "not used"]
    errors = [f"{used[f'{name}_part_se'].median():.2f} for {name}" for name in ("where", "what")]
    said_of_parts, counted = needs.attrs["statement"].split(" Heads (share of the sum): ")
    for row in document.rows("where_or_what"):
        assert f"{row['verdict']} {row['heads']} ({row['share']})" in counted or row["verdict"] == "not used"
    may = counted.removesuffix(".").split(", of which ")[1:]
    assert ("Of the undecided heads, " in answer) == bool(may)
    assert all(f"Of the undecided heads, {words}." in answer for words in may)
    statement = (
        f"{said_of_parts} Here ± is a standard error over texts. The median error of a single head that contributes"
    )
    assert answer.startswith(f"{statement} is {' and '.join(errors)}.")
    options: dict[str, Any] = OPTIONS | {"exact": 0, "seed": 5}
    random = pd.concat([tp.where_or_what(copy, TOKENS, **options) for copy in tp.random_control(model, [5, 6])])
    used = random[random["verdict"] != "not used"]
    assert f"With random weights, {len(used)} of 32 heads contribute measurably: " in answer
    for name in ("where", "what", "neither"):
        low, middle, high = (f"{x:.2f}" for x in np.quantile(used[f"{name}_part"], (0.05, 0.5, 0.95)))
        assert f"{name} {middle} ({low} to {high})" in answer
    for kind, count in used["verdict"].value_counts().items():
        assert f"{count} {kind}" in answer.split("With random weights")[1]
    (crosses,) = (trace for trace in document.drawn("Parts of each head") if trace["name"] == "random weights")
    assert sorted(crosses["x"]) == pytest.approx(sorted(used["where_part"]))
    for row in document.rows("where_or_what"):
        found = needs[needs["verdict"] == row["verdict"]]
        assert row["heads"] == str(len(found))
        assert row["largest"] == ", ".join(labels(found)[:3])
        share = 100 * found["contribution"].sum() / needs["contribution"].sum()
        assert row["share"] == f"{share:.0f} %"
    assert {row["verdict"] for row in document.rows("where_or_what")} == set(needs["verdict"])


def test_a_panel_begins_with_the_description_of_its_head(made: tuple[Any, Document], needs: pd.DataFrame) -> None:
    """Its own numbers, in the sentences of the experiment."""
    _, document = made
    rows = {row["head"]: row for row in document.rows("atlas")}
    for row, label in zip(needs.to_dict("records"), labels(needs), strict=True):
        says = document.data["atlas-data"]["panels"][label]["says"]
        expected = [*map(unbroken, needs_sentences(row, needs.attrs["df"]))]
        assert says[: len(expected)] == expected
        assert says[0].startswith(f"{label} contributes ")
        (variance,) = [sentence for sentence in says if sentence.startswith("Of the variance of its scores")]
        distance, key = (100 * as_number(rows[label][f"{name} alone"]) for name in ("distance", "key"))
        shown = re.findall(r"explains (\d+)\s%, the key (\d+)\s%", variance)[0]
        assert [int(x) for x in shown] == pytest.approx([distance, key], abs=0.56)


def test_a_panel_keeps_the_first_token_apart(made: tuple[Any, Document]) -> None:
    """Its share of the attention, and the largest mean attention to another key at a distance that is frequent."""
    model, document = made
    for layer in OPTIONS["layers"]:
        name = f"blocks.{layer}.attn.hook_pattern"
        pattern = model.run_with_cache(TOKENS, names_filter=name)[1][name].double()
        means = torch.stack([pattern.diagonal(-d, -2, -1)[..., 1:].mean((0, -1)) for d in range(24)], 1)
        for head, of_head in enumerate(means):
            says = " ".join(document.data["atlas-data"]["panels"][f"L{layer}H{head}"]["says"])
            share = 100 * float(pattern[:, head, 1:, 0].mean())
            found = re.findall(r"The first token gets (\d+)\s% .* others is largest at distance (\d+): ([\d.]+)", says)
            assert [float(x) for x in found[0]] == pytest.approx(
                [share, int(of_head.argmax()), float(of_head.max())], abs=0.51
            )
            assert float(found[0][2]) == pytest.approx(float(of_head.max()), abs=0.0051)


def test_the_atlas_says_the_numbers_of_its_table_and_draws_profiles(made: tuple[Any, Document]) -> None:
    model, document = made
    rows, hover = document.rows("atlas"), document.data["atlas-data"]["hover"]
    assert len(rows) == len(hover) == 16
    assert not any(x == "–" for row in rows for x in row.values())
    errors = ("contribution", "where", "what", "neither", "joint")
    read = tp.capture(model, TOKENS, layers=OPTIONS["layers"])
    profiles = {x.layer: tp.fit_additive(x.scores, pool=True).distance.numpy() for x in read}
    for row, text in zip(rows, hover, strict=True):
        assert text.startswith(f"{row['head']}\nverdict: {row['verdict']}\n")
        assert all(f"\n{name}: {row[name]} ± {row[f'error of {name}']}\n" in text for name in errors)
        assert f"\nmeasured: {row['measured']}\n" in text
        assert text.endswith("\n(± standard error over texts)")
        for name in ("distance alone", "key alone", "held-out r", "added loss", "profile"):
            assert f"\n{name}: {row[name]}\n" in text
        layer, head = map(int, re.findall(r"\d+", row["head"]))
        shown = profiles[layer][head, [0, 1, 2, 4, 8, 16, 32]]
        assert as_number(row["range"]) == pytest.approx(np.ptp(shown), abs=6e-3)
        line = row["profile"]
        assert (line[shown.argmin()], line[shown.argmax()], len(line)) == ("▁", "█", 7)
        assert sorted(line) == [line[n] for n in shown.argsort()]  # higher where the profile is


def test_ablation_is_on_request_and_a_bar_names_the_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = Document(tp.report(tp.load_demo_model(), TOKENS[:, :16], tmp_path / "r.html", layers=[1], heads=[0, 3]))
    ids = {a.get("id") for _, a in document.attributes}
    assert ids & set(SECTION_NAMES) == set(SECTION_NAMES) - {"ablation"}
    bars = [x.strip() for x in re.split(r"[\r\n]", capsys.readouterr().err)]
    assert sum(x.startswith("passes and runs:   0%") for x in bars) == 1  # of the model, not of its copy
    counts = [re.search(r"report: .*\| (\d+)/10 .*section(?:/s)?, ([\w, ]+)\]", x) for x in bars]
    running = [(int(found[1]), found[2]) for found in counts if found]
    assert {(0, "where_or_what"), (1, "additivity"), (6, "where_or_what, random weights")} <= set(running)
    assert running[-1][0] == 10


@pytest.mark.slow
def test_a_single_text_is_no_answer(tmp_path: Path) -> None:
    """The section says why, in the words of the experiment; the map begins with another measure."""
    model = tp.load_demo_model()
    options: Any = {"layers": [3], "control": 0, "progress": False}
    document = Document(tp.report(model, TOKENS[:1, :24], tmp_path / "r.html", **options))
    with pytest.raises(ValueError, match="must be at least two texts") as refused:
        tp.where_or_what(model, TOKENS[:1, :24], progress=False)
    assert f"Not measured: {refused.value}" in document.text
    check_without_verdicts(document)
    assert len(document.rows("atlas")) == 8


def check_without_verdicts(document: Document) -> None:
    """No head has a verdict, in the map or in its panel, and all have the numbers of other sections."""
    assert "verdict" not in document.rows("atlas")[0]
    data = document.data["atlas-data"]
    assert "verdict" not in data["colours"]
    assert not any("verdict" in text for text in data["hover"])
    assert all(one["says"][0].startswith("Of the variance of its scores") for one in data["panels"].values())


def test_the_file_is_valid_and_closed(made: tuple[Any, Document]) -> None:
    _, document = made
    assert document.wrong == []
    assert set(document.hashes) == document.allowed
    assert "default-src 'none'" in document.policy
    assert "http" not in document.policy
    assert "unsafe" not in document.policy.split("script-src")[1].split(";")[0]
    for tag, attributes in document.attributes:
        assert tag not in ("link", "img", "iframe", "object", "base", "form")
        for name, value in attributes.items():
            assert name not in ("src", "srcset", "data", "action", "poster"), f"<{tag} {name}={value!r}>"
            if name == "href":
                assert str(value).startswith(("#", "https://arxiv.org/abs/")), value
            assert not name.startswith("on")
    assert "url(" not in re.sub(r"<script.*?</script>", "", document.source, flags=re.DOTALL)
    ids = [attributes["id"] for _, attributes in document.attributes if "id" in attributes]
    assert len(set(ids)) == len(ids)
    links = [str(a["href"]) for tag, a in document.attributes if tag == "a" and "href" in a]
    targets = [link[1:] for link in links if link.startswith("#")]
    assert set(targets) <= set(ids)
    figures = [attributes for _, attributes in document.attributes if attributes.get("class") == "plot"]
    assert all(a["role"] == "img" and a["aria-label"] for a in figures)
    assert all(a["scope"] in ("row", "col") for tag, a in document.attributes if tag == "th")
    assert ("html", {"lang": "en"}) in document.attributes


def test_what_was_analysed_and_how_to_do_it_again(made: tuple[Any, Document]) -> None:
    model, document = made
    assert f"tl_posdisent-demo ({type(model).__name__}" in document.text
    assert "2 texts of 48 tokens" in document.text
    call = f"report(model, tokens, 'report.html', layers=[2, 4], sections={list(SECTION_NAMES)!r}, control=2, seed=5)"
    assert call in document.text
    assert f"tl_posdisent {tp.__version__}" in document.text


def test_the_same_again_byte_for_byte_and_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tp.load_demo_model()
    options: dict[str, Any] = {"heads": ["L3H5", (1, 0), (4, -1)], "sections": ["additivity", "ablation"]}
    pages = [tp.report(model, TOKENS[:, :16], tmp_path / n / "r.html", progress=False, **options) for n in "ab"]
    assert pages[0].read_bytes() == pages[1].read_bytes()
    document = Document(pages[0])
    assert [row["head"] for row in document.rows("atlas")] == ["L1H0", "L3H5", "L4H7"]
    assert "3, of 8 a layer" in document.text
    assert "heads=['L1H0', 'L3H5', 'L4H7'], sections=[" in document.text
    assert not {"shares", "distance", "where_or_what"} & {a.get("id") for _, a in document.attributes}
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["a", "r.html", "b", "r.html"]
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_long_texts_are_cut_and_it_is_said(tmp_path: Path) -> None:
    model, text = tp.load_demo_model(), tp.demo_text()
    options: dict[str, Any] = {"sections": ["additivity"], "layers": [4], "control": 0, "progress": False}
    document = Document(tp.report(model, text, tmp_path / "string.html", **options))
    given = model.to_tokens(text, truncate=False).shape[1]
    assert f"12 texts of 128 tokens, of {given} tokens given" in document.text
    tokens = tp.cut_text(model, text)
    columns = {"distance alone": "share_distance"}
    table = tp.additivity(model, tokens, layers=[4], progress=False).groupby(HEAD, as_index=False).mean()
    agrees(document, "atlas", columns | {"held-out r": "r_held_out"}, table)

    ids = tp.demo_tokens(length=520)
    document = Document(tp.report(model, ids, tmp_path / "ids.html", **options))
    assert "1 text of 512 tokens, of 520 tokens given" in document.text
    table = tp.additivity(model, ids[:, :512], layers=[4], progress=False)
    agrees(document, "atlas", columns | {"r": "r"}, table)


def test_texts_of_several_lengths_are_refused(tmp_path: Path) -> None:
    model = tp.load_demo_model()
    words = ["We hold these truths to be self-evident", "that all men are created equal, and so on, and so on"]
    with pytest.raises(ValueError, match=r"text must be texts of one length, got \d+ to \d+ tokens: cut them"):
        tp.report(model, words, tmp_path / "a.html", progress=False)
    mask = torch.ones_like(TOKENS)
    mask[0, 30:] = 0
    padded = {"input_ids": TOKENS * mask, "attention_mask": mask}
    with pytest.raises(ValueError, match="text must be texts of one length, got 30 to 48 tokens"):
        tp.report(model, padded, tmp_path / "a.html", progress=False)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("kind", "name"), zoo.cases("gpt2"))
def test_without_rotary_embeddings_there_are_reasons(
    kind: str, name: str, shared_model: Callable[[str, str], Any], tmp_path: Path
) -> None:
    model, tokens = shared_model(kind, name), zoo.random_tokens(length=24)
    sections: Any = ["where_or_what", "additivity", "shares", "perturbation"]
    options: Any = {"sections": sections, "control": 0, "progress": False}
    document = Document(tp.report(model, tokens, tmp_path / "report.html", **options))
    assert document.wrong == []
    assert "Traceback" not in document.source
    for tool in ("where_or_what", "controlled_distance"):
        assert f"Not measured: {tool} needs rotary position embeddings (RoPE)" in document.text
    check_without_verdicts(document)
    assert "Mean attention with every key at distance 5: " in document.text  # and why there is none
    assert "rotary embeddings: none" in document.text
    assert {row["exchanged"] for row in document.rows("perturbation")} == {"tokens of the text"}
    table = tp.additivity(model, tokens, progress=False).groupby(HEAD, as_index=False).mean()
    agrees(document, "atlas", {"held-out r": "r_held_out", "key alone": "share_key"}, table)
    with pytest.raises(ValueError, match="can be measured: controlled_distance needs rotary"):
        tp.report(model, tokens, tmp_path / "none.html", sections=["shares"], progress=False)
    assert not (tmp_path / "none.html").exists()


@pytest.mark.skipif(zoo.TL_MAJOR >= 4, reason="HookedTransformer was removed in TransformerLens 4")
def test_in_both_directions(tmp_path: Path) -> None:
    """Distances below 0, scores of all keys, and no next token to foresee."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    sizes = {"n_layers": 2, "n_heads": 3, "d_model": 24, "d_head": 8, "d_mlp": 32, "n_ctx": 32, "d_vocab": 61}
    config = HookedTransformerConfig(**sizes, act_fn="relu", attention_dir="bidirectional", seed=0)
    model = HookedTransformer(config).eval()
    tokens = zoo.random_tokens()
    document = Document(tp.report(model, tokens, tmp_path / "r.html", progress=False))
    assert document.wrong == []
    assert "in both directions" in document.text
    assert "model must be causal" in document.text
    layers = tp.capture(model, tokens)
    fit = tp.fit_additive(layers[0].scores, mask="full", pool=True)
    for line, profile in zip(document.drawn("Distance component"), fit.distance, strict=False):
        assert list(line["customdata"]) == fit.distances.tolist()
        assert list(line["y"]) == pytest.approx(profile.tolist())
    for layer in layers:
        for head in range(3):
            panel = document.data["atlas-data"]["panels"][f"L{layer.layer}H{head}"]
            expected = layer.scores[0, head].numpy()
            found = decoded(panel["scores"], tokens.shape[1], causal=False)
            assert found == pytest.approx(expected, abs=float(0.51 * np.ptp(expected) / 254))


def test_hooks_of_the_user_are_measured(tmp_path: Path) -> None:
    model = tp.load_demo_model()
    with model.hooks(fwd_hooks=tp.dummy_distance(model, 3, layers=[4])):
        options: Any = {"layers": [4], "sections": ["additivity"], "control": 0, "progress": False}
        path = tp.report(model, TOKENS, tmp_path / "r.html", **options)
        table = over_texts(model, layers=[4])
    agrees(Document(path), "atlas", {"held-out r": "r_held_out", "distance alone": "share_distance"}, table)
    plain = over_texts(model, layers=[4])
    assert (plain["r"] - table["r"]).abs().max() > 0.01


@pytest.mark.slow
def test_what_has_no_answer_is_not_given_one(tmp_path: Path) -> None:
    """Scores that do not vary, a text in which 5 % is less than one token, a head without which nothing is worse."""
    model = tp.load_demo_model()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if re.search(r"W_Q|\bq(_proj)?\b.*weight", name):
                weights.zero_()
    names = ["additivity", "perturbation", "ablation"]
    options: dict[str, Any] = {"sections": names, "layers": [2], "heads": [3], "control": 0, "progress": False}
    document = Document(tp.report(model, TOKENS[:, :12], tmp_path / "report.html", **options))
    assert document.wrong == []
    assert "No head has scores that vary in these texts." in document.text
    assert "Exchanging 5 % of neighbours" not in document.text
    effect = tp.head_ablation(model, TOKENS[:, :12], layers=[2], heads=[3], progress=False)["effect"].item()
    assert ("Ablating a single head never raises the loss" in document.text) == (effect <= 0)
    assert document.rows("atlas")[0]["distance alone"] == "–"
