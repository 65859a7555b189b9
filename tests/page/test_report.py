"""The report says what the experiments say, and is one file that is valid, small, closed to the outside and whole."""

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
from support.documents import Document, as_number
from torch.nn.modules.module import register_module_forward_hook

import tl_posdisent as tp
from tl_posdisent.experiments.needs.sentences import needs_sentences
from tl_posdisent.page.build import read_settings
from tl_posdisent.page.measuring.panels import measure_panels, panel_tokens
from tl_posdisent.page.measuring.subject import read_subject
from tl_posdisent.page.sections.all_sections import SECTIONS
from tl_posdisent.page.sections.ladder import MEASURED_RUNGS
from tl_posdisent.page.sections.names import DEFAULT
from tl_posdisent.page.sections.perturbation import FRACTIONS

TOKENS = tp.demo_tokens(length=97)[:, 1:].view(2, 48)
HEAD = ["layer", "head"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Document]:
    """A model and its report with all sections."""
    model = tp.load_demo_model()
    path = tmp_path_factory.mktemp("report") / "new" / "report.html"
    assert tp.report(model, TOKENS, path, sections=list(SECTIONS), control=2, seed=5, progress=False) == path
    assert path.stat().st_size < 4_000_000
    return model, Document(path)


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


def whole_verdict(row: dict[str, str]) -> str:
    """The verdict of ``head_verdicts`` and between what it is, from the two columns of a table in the report."""
    between = row["undecided between"]
    assert (row["verdict"] == "undecided") == (between != "–")
    return row["verdict"] if between == "–" else f"undecided between {between}"


def over_texts(model: Any, **options: Any) -> pd.DataFrame:
    return tp.additivity(model, TOKENS, progress=False, **options).groupby(HEAD, as_index=False).mean()


@pytest.mark.slow
def test_numbers_are_those_of_the_experiments(made: tuple[Any, Document]) -> None:
    model, document = made
    copies, quiet = list(tp.random_control(model, [5, 6])), {"progress": False}
    r = over_texts(model)
    for name, column in {"random r": "r", "random held-out r": "r_held_out"}.items():
        r[name] = sum(over_texts(m)[column] for m in copies) / 2
    columns = {name: name for name in ("r", "random r")} | {"adjusted r²": "r2_adjusted"}
    columns |= {"held-out r": "r_held_out", "random held-out r": "random held-out r"}
    columns |= {f"{part} alone": f"share_{part}" for part in ("distance", "query", "key")}
    agrees(document, "heads-r", columns, r)
    for name in ("share_distance", "share_key"):
        r[f"random {name}"] = sum(over_texts(m)[name] for m in copies) / 2
    by_layer = r.groupby("layer").mean()
    by_layer["low"], by_layer["high"] = r.groupby("layer")["r"].min(), r.groupby("layer")["r"].max()
    titles = {"mean r": "r", "lowest": "low", "highest": "high", "random": "random r"}
    titles |= {"held-out": "r_held_out", "random held-out": "random held-out r"}
    titles |= {"distance alone": "share_distance", "random distance alone": "random share_distance"}
    agrees(document, "layers-r", titles | {"random key alone": "random share_key"}, by_layer)

    shares = tp.controlled_distance(model, TOKENS, **quiet)
    random_shares = pd.concat([tp.controlled_distance(m, TOKENS, **quiet) for m in copies])
    titles = {"r two axis": "r_two_axis", "r three axis": "r_three_axis"}
    agrees(document, "heads-shares", titles | {e.replace(":", " × "): e for e in tp.rope.COMPONENTS}, shares)
    agrees(document, "layers-shares", {"random r two axis": "r_two_axis"}, random_shares.groupby("layer").mean())

    patterns = tp.subspace_patterns(model, TOKENS, **quiet).groupby("subspace").mean()
    titles = {name: name for name in ("turn", "distance", "semantic", "interaction")}
    agrees(document, "subspaces", titles | {"concentration of keys": "key_concentration"}, patterns)

    curve = tp.perturbation_curve(model, TOKENS, fractions=FRACTIONS, seeds=[5, 6], **quiet)
    assert [row["kind"] for row in document.rows("perturbation")] == curve["kind"].tolist()
    draws = [tp.perturbation_curve(model, TOKENS, fractions=FRACTIONS, seeds=[n], **quiet) for n in (5, 6)]
    losses = np.stack([draw["added_loss"] for draw in draws])
    curve = curve.assign(lower=losses.min(0), higher=losses.max(0))
    titles = {"added loss": "added_loss", "lower of the draws": "lower", "higher of the draws": "higher", "KL": "kl"}
    agrees(document, "perturbation", titles, curve, 4)
    agrees(document, "perturbation", {"accuracy": "accuracy", "tokens moved": "moved"}, curve)

    drops = tp.head_ablation(model, TOKENS, **quiet)
    agrees(document, "heads-ablation", {"loss without it": "value", "added loss": "effect"}, drops, 4)
    worst = drops.sort_values("effect", ascending=False).head(8)
    agrees(document, "ablation", {"added loss": "effect"}, worst, 4)

    ladder = tp.attention_ladder(model, TOKENS[:1], rungs=MEASURED_RUNGS, heldout=TOKENS[1:], controls=[], **quiet)
    found = (
        tp.head_verdicts(ladder).query("verdict not in ('no effect', 'not used')").sort_values("gap", ascending=False)
    )
    recovered = ladder.pivot(index=HEAD, columns="rung", values="recovered_kl").reset_index()
    found = found.merge(recovered, on=HEAD, how="left", suffixes=("", "_rung"))
    doubts = (" between " + found["between"]).where(found["between"] != "", "")
    assert [whole_verdict(row) for row in document.rows("ladder")] == (found["verdict"] + doubts).tolist()
    titles = {"gap (nats per token)": "gap", "standard error of the gap": "error", "distance + sink": "distance+sink"}
    agrees(document, "ladder", titles | {rung: rung for rung in ("static", "additive")}, found)

    correlations = (
        (shares["r_two_axis"], random_shares["r_two_axis"]),
        (shares["r_three_axis"], random_shares["r_three_axis"]),
        (r["r"], r["random r"]),
        (r["r_held_out"], r["random held-out r"]),
    )
    for row, (here, random) in zip(document.rows("headline"), correlations, strict=True):
        assert row["this model"] == f"{here.mean():.3f} ({here.min():.3f} to {here.max():.3f})"
        mean, _, copies = row["random"].partition(" ")
        assert as_number(mean) == pytest.approx(random.mean(), abs=6e-4)
        assert copies == "(2 random copies)"
    assert "0.959" in document.rows("headline")[0]["the papers"]


def test_every_error_says_over_what(made: tuple[Any, Document]) -> None:
    """Each sentence, title and caption with a ± says that it is a standard error, and over what."""
    _, document = made
    visible = re.sub(r"<(script|style).*?</\1>", "", document.source, flags=re.DOTALL)
    blocks = re.split(r"</(?:li|p|th|td|figcaption)>", visible)
    with_error = [" ".join(re.sub(r"<[^>]+>", "", block).split()) for block in blocks if "±" in block]
    assert len(with_error) >= 3
    assert [block for block in with_error if not re.search("standard error over (texts|copies)", block)] == []
    hovers = re.findall(r'"[^"]*±[^"]*"', "".join(str(figure).replace("'", '"') for figure in document.figures))
    assert hovers
    assert [text for text in hovers if "standard error" not in text] == []


def test_no_sentence_is_printed_twice(made: tuple[Any, Document]) -> None:
    """But for what a section read, and the explanations of charts, which can stand alone."""
    _, document = made
    blocks = re.findall(r"<(p|li|dd|figcaption)\b[^>]*>(.*?)</\1>", document.source, flags=re.DOTALL)
    texts = [" ".join(re.sub(r"<[^>]+>", "", block).split()) for _, block in blocks]
    sentences = Counter(x for text in texts for x in re.findall(r"[^.;]{40,}[.;](?= |$)", text))
    assert len(sentences) > 50
    assert [x for x, count in sentences.items() if count > 1 and not x.startswith("Read: ")] == []


def test_distance_profiles_are_those_of_pooled_fits(made: tuple[Any, Document]) -> None:
    model, document = made
    for n, layer in enumerate(tp.capture(model, TOKENS)):
        profiles = tp.fit_additive(layer.scores, pool=True).distance
        for line, profile in zip(document.drawn(f"the heads of layer {n}"), profiles, strict=True):
            assert list(line["customdata"][:16]) == pytest.approx(range(16))  # from 16 on, means of several distances
            assert list(line["y"][:16]) == pytest.approx(profile[:16].tolist())
            cells = 48 - torch.arange(16, 48)  # together they have the mean of all these cells
            assert min(line["y"][16:]) <= (profile[16:] * cells).sum() / cells.sum() <= max(line["y"][16:])
            assert 40 < line["customdata"][-1] < 48


def test_figures_draw_the_numbers_of_their_tables(made: tuple[Any, Document]) -> None:
    _, document = made
    for caption, table, title in (
        ("held-out r of this model", "heads-r", "held-out r"),
        ("held-out r at random", "heads-r", "random held-out r"),
        ("Added loss without", "heads-ablation", "added loss"),
    ):
        (heat,) = document.drawn(caption)
        assert heat["z"].ravel() == pytest.approx(column(document, table, title), abs=6e-4), caption
    for caption, table in (("Share of the variance", "heads-shares"), ("Contribution to the var", "subspaces")):
        for bars in document.drawn(caption):
            assert list(bars["y"]) == pytest.approx(column(document, table, bars["name"]), abs=6e-4), caption
    rows = document.rows("perturbation")
    lines = [trace for trace in document.drawn("Added loss by perturbed") if "name" in trace]
    assert [y for line in lines for y in line["y"]] == pytest.approx(
        column(document, "perturbation", "added loss"), abs=6e-5
    )
    assert [x for line in lines for x in line["x"]] == [as_number(row["fraction asked for"]) for row in rows]
    (concentration,) = document.drawn("Concentration of keys")
    means = concentration["z"].mean(1)
    assert means == pytest.approx(column(document, "subspaces", "concentration of keys"), abs=6e-4)


def test_no_text_is_written_in_cells(made: tuple[Any, Document]) -> None:
    """No ink has enough contrast on all colours, in the light and in the dark, where figures are inverted."""
    _, document = made
    drawn = [trace for figure in document.figures for trace in figure["data"]]
    (offered,) = [figure["choices"] for figure in document.figures if "choices" in figure]
    drawn += [trace for colour in offered["colours"].values() for trace in colour["map"]]
    maps = [trace for trace in drawn if trace["type"] == "heatmap"]
    assert len(maps) > 12
    assert not [trace for trace in maps if "text" in trace or "texttemplate" in trace]


def test_labels_are_those_of_head_labels(made: tuple[Any, Document]) -> None:
    """In the section, in the atlas, in the hover text, in the panels and in the sentence that counts them."""
    model, document = made
    table = tp.head_labels(model, TOKENS, seed=5, seeds=[5, 6], progress=False)
    table["words"] = [label.replace("_", " ").replace("+", " + ") or "none" for label in table["label"]]
    by_head = dict(zip(labels(table), table["words"], strict=True))
    assert set(by_head.values()) > {"none"}
    assert {row["head"]: row["label"] for row in document.rows("atlas")} == by_head
    hover = np.array(document.drawn("What the contribution needs")[0]["customdata"]).ravel()
    assert ["".join(re.findall("<br>label: ([a-z +]+)", text)) for text in hover] == table["words"].tolist()
    for head, words in by_head.items():
        (said,) = [x for x in document.data["panels"]["heads"][head]["says"] if x.startswith("Usual label")]
        assert said.split(": ")[1] == words.replace(" + ", ", ") + "."
    ranked = table.sort_values("label", key=lambda label: label == "", kind="stable")
    assert [row["label"] for row in document.rows("heads-labels")] == ranked["words"].tolist()
    measures = {
        name.replace("_", " "): name for name in table.columns if name.startswith(("prev", "ind", "loc", "ent"))
    }
    agrees(document, "heads-labels", measures, ranked)
    named = [name for label in by_head.values() if label != "none" for name in label.split(" + ")]
    (counted,) = re.findall(
        r"(\d+) of 40 heads have a label, by the keys that they attend to: (.*?) \(",
        " ".join(document.text.split()),
    )
    assert int(counted[0]) == 40 - [*by_head.values()].count("none")
    assert sorted(counted[1].split(", ")) == sorted(f"{n} {name}" for name, n in Counter(named).items())


@pytest.fixture(scope="module")
def needs(made: tuple[Any, Document]) -> pd.DataFrame:
    """What the report's heads need, by the experiment alone; the heads that contribute most first."""
    table = tp.where_or_what(made[0], TOKENS, exact=6, seed=5, progress=False)
    return table.sort_values("contribution", ascending=False, kind="stable")


def test_what_heads_need_is_that_of_the_experiment(made: tuple[Any, Document], needs: pd.DataFrame) -> None:
    """In the table, which is sorted by contribution, in the plane, and in the map, where not all is told by colour."""
    _, document = made
    titles = {"where": "where_unclipped", "what": "what_unclipped", "error of where": "where_se"}
    agrees(document, "atlas", titles | {"error of what": "what_se", "uniform": "uniform_unclipped"}, needs, 2)
    agrees(document, "atlas", {"contribution": "contribution", "error of contribution": "contribution_se"}, needs, 4)
    rows = document.rows("atlas")
    assert [row["verdict"] for row in rows] == needs["verdict"].tolist()
    assert [row["exact"] == "yes" for row in rows] == needs["exact"].tolist()
    assert needs["exact"].sum() == 6
    points = [trace for trace in document.drawn("share that survives") if trace["name"] in set(needs["verdict"])]
    drawn = {
        label: (x, y)
        for trace in points
        for (label, _), x, y in zip(trace["customdata"], trace["x"], trace["y"], strict=True)
    }
    for row, label in zip(needs.itertuples(), labels(needs), strict=True):
        assert drawn[label] == pytest.approx((row.where, row.what))
    heat, *marks = document.drawn("What the contribution needs")
    names = dict(zip(heat["colorbar"]["tickvals"], heat["colorbar"]["ticktext"], strict=True))
    in_order = needs.sort_values(HEAD)
    assert [names[code] for code in np.array(heat["z"]).ravel()] == in_order["verdict"].tolist()
    marked = {trace["name"]: set(zip(trace["y"], trace["x"], strict=True)) for trace in marks}
    for verdict in ("undecided", "not used"):
        expected = needs[needs["verdict"] == verdict]
        assert marked.pop(verdict, set()) == set(
            zip(expected["layer"].map(str), expected["head"].map(str), strict=True)
        )
    assert marked == {}
    assert "undecided" in set(needs["verdict"])


def test_the_answer_counts_the_table(made: tuple[Any, Document], needs: pd.DataFrame) -> None:
    """And says where the heads of one random copy lie."""
    model, document = made
    verdict = " ".join(document.source.split('<section id="verdict">')[1].split("</section>")[0].split())
    answer = re.sub("<[^>]+>", "", re.findall("<li>(.*?)</li>", verdict)[0])
    assert answer.startswith(needs.attrs["statement"].removesuffix(".") + " (where_or_what, 2 texts of 48 tokens).")
    used = needs[needs["verdict"] != "not used"]
    errors = " and ".join(f"{used[name].median():.2f}" for name in ("where_se", "what_se"))
    assert f"have standard errors over texts of {errors} (medians" in answer
    (copy,) = tp.random_control(model, [5])
    random = tp.where_or_what(copy, TOKENS, exact=0, seed=5, progress=False)
    used = random[random["verdict"] != "not used"]
    assert f"In a random copy of the weights, {len(used) or 'none'} of 40 heads contribute measurably" in answer
    for name, words in (("where", "distances alone keep"), ("what", "content alone")):
        low, middle, high = (f"{x:.2f}" for x in np.quantile(used[name], (0.05, 0.5, 0.95)))
        assert f"{words} {middle} ({low} to {high})" in answer
    for kind, count in used["verdict"].value_counts().items():
        assert f"{count} {kind}" in answer.split("random copy")[1]


def test_a_panel_begins_with_the_description_of_its_head(made: tuple[Any, Document], needs: pd.DataFrame) -> None:
    """Its own numbers, in the sentences of the experiment."""
    _, document = made
    shares = {row["head"]: row for row in document.rows("heads-r")}
    for row, label in zip(needs.to_dict("records"), labels(needs), strict=True):
        says = document.data["panels"]["heads"][label]["says"]
        expected = needs_sentences(row)
        assert says[: len(expected)] == expected
        assert says[0].startswith(f"{label} contributes ")
        (variance,) = [sentence for sentence in says if sentence.startswith("Of the variance of its scores")]
        distance, key = (100 * as_number(shares[label][f"{name} alone"]) for name in ("distance", "key"))
        shown = re.findall(r"explains (\d+) %, the key (\d+) %", variance)[0]
        assert [int(x) for x in shown] == pytest.approx([distance, key], abs=0.56)


def test_a_panel_keeps_the_first_token_apart(made: tuple[Any, Document]) -> None:
    """Its share of the attention, and the largest mean attention to another key at a distance that is frequent."""
    model, document = made
    for layer in range(5):
        name = f"blocks.{layer}.attn.hook_pattern"
        pattern = model.run_with_cache(TOKENS, names_filter=name)[1][name].double()
        means = torch.stack([pattern.diagonal(-d, -2, -1)[..., 1:].mean((0, -1)) for d in range(24)], 1)
        for head, of_head in enumerate(means):
            says = " ".join(document.data["panels"]["heads"][f"L{layer}H{head}"]["says"])
            share = 100 * float(pattern[:, head, 1:, 0].mean())
            found = re.findall(r"The first token gets (\d+) % .* others is largest at distance (\d+): ([\d.]+)", says)
            assert [float(x) for x in found[0]] == pytest.approx(
                [share, int(of_head.argmax()), float(of_head.max())], abs=0.51
            )
            assert float(found[0][2]) == pytest.approx(float(of_head.max()), abs=0.0051)


def test_each_number_of_the_atlas_is_that_of_its_table(made: tuple[Any, Document], needs: pd.DataFrame) -> None:
    model, document = made
    atlas = document.rows("atlas")
    r, drops, climbed = (
        {row["head"]: row for row in document.rows(name)} for name in ("heads-r", "heads-ablation", "ladder")
    )
    assert len(atlas) == 40
    assert climbed
    assert not any(x == "–" for row in atlas for name, x in row.items() if name != "undecided between")
    hover = np.array(document.drawn("What the contribution needs")[0]["customdata"])
    profiles = np.concatenate([tp.fit_additive(x.scores, pool=True).distance for x in tp.capture(model, TOKENS)])
    for row, pair in zip(atlas, needs[HEAD].to_numpy(), strict=True):
        head, text = row["head"], hover[tuple(pair)]
        for name in ("distance alone", "key alone", "held-out r"):
            assert row[name] == r[head][name]
        assert row["added loss"] == drops[head]["added loss"]
        ladder = whole_verdict(row | {"verdict": row["ladder"]})
        assert ladder in ((whole_verdict(climbed[head]),) if head in climbed else ("no effect", "not used"))
        assert text.startswith(
            f"<b>{head}</b> verdict: {row['verdict']}<br>where {row['where']} ± {row['error of where']}"
        )
        assert f"what {row['what']} ± {row['error of what']} (± standard error over texts)<br>contribution" in text
        assert f"contribution {row['contribution']} nats per token<br>" in text
        assert f"distance alone {row['distance alone']}, key alone {row['key alone']}<br>" in text
        assert f"added loss without it: {'' if row['added loss'][0] == '−' else '+'}{row['added loss']} nats" in text
        assert f"ladder: {ladder}<br>" in text
        assert f"profile: {row['profile']} over {row['range']}" in text
        shown = profiles[8 * pair[0] + pair[1], [0, 1, 2, 4, 8, 16, 32]]
        assert as_number(row["range"]) == pytest.approx(np.ptp(shown), abs=6e-3)
        line = row["profile"]
        assert (line[shown.argmin()], line[shown.argmax()], len(line)) == ("▁", "█", 7)
        assert sorted(line) == [line[n] for n in shown.argsort()]  # higher where the profile is


def test_sections_that_run_each_head_are_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the number of passes is said before."""
    path = tmp_path / "r.html"
    document = Document(tp.report(tp.load_demo_model(), TOKENS, path, layers=[1]))
    ids = {a.get("id") for _, a in document.attributes}
    assert ids & set(SECTIONS) == set(SECTIONS) - {"ablation", "ladder"} == set(DEFAULT)
    said = capsys.readouterr().err
    assert re.search(r"report: about \d+ forward passes of 2 texts of 48 tokens \(where_or_what \d", said)
    bars = [x.strip() for x in re.split(r"[\r\n]", said)]
    assert sum(x.startswith("passes:   0%") for x in bars) == 1  # of the model, not of its copy


def test_the_bar_counts_passes_and_names_the_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, sections = tp.load_demo_model(), ["additivity", "perturbation"]
    options: dict[str, Any] = {"layers": [1], "control": 0, "sections": sections}
    tp.report(model, TOKENS, tmp_path / "r.html", **options)
    said = capsys.readouterr().err
    first, second = (float(x) for x in re.findall(r"additivity ([\d.]+), perturbation ([\d.]+)", said)[0])
    bars = [x for x in re.split(r"[\r\n]", said) if x.startswith("report: ") and "passes [" in x]
    counts = [tuple(map(int, re.findall(r"(\d+)/(\d+) passes", x)[0])) for x in bars]
    assert {total for _, total in counts} == {round(first + second)}
    running = [(n, name) for (n, _), x in zip(counts, bars, strict=True) for name in re.findall(r", (\w+)\]", x)]
    assert (0, "additivity") in running
    assert (round(first), "perturbation") in running
    assert counts[-1] == (round(first + second),) * 2


def test_the_passes_that_are_said_are_those_that_run() -> None:
    """Within a quarter: copies are read, shortcuts are checked, and heads run from their own layers on."""
    model = tp.load_demo_model()
    subject = read_subject(model, tp.demo_tokens(length=385)[:, 1:].view(6, 64))
    settings, counted = read_settings(subject, 0, 1, progress=False), [0.0]
    attention = type(model.blocks[0].attn)

    def count(module: Any, inputs: Any, output: Any) -> None:
        if isinstance(module, attention):
            counted[0] += output.shape[0] * output.shape[1] / 5

    handle, measured = register_module_forward_hook(count), {}
    try:
        for name in DEFAULT:
            before = counted[0]
            measured[name] = SECTIONS[name].measure(subject, settings, measured)
            tokens = counted[0] - before
            if name == "where_or_what":
                tokens += 2 * 2 * 5 * measured[name].read.n_run  # gradients of the metric and of 4 draws, of 2 models
            assert SECTIONS[name].passes(subject, settings) == pytest.approx(tokens, rel=0.25, abs=100), name
        before = counted[0]
        measure_panels(subject, subject.pairs)
        assert counted[0] - before == pytest.approx(panel_tokens(subject), rel=0.05)
    finally:
        handle.remove()


def test_a_single_text_is_no_answer(tmp_path: Path) -> None:
    """The section says why, in the words of the experiment, and the map is grey."""
    model = tp.load_demo_model()
    document = Document(tp.report(model, TOKENS[:1], tmp_path / "r.html", control=0, progress=False))
    with pytest.raises(ValueError, match="must be at least two texts") as refused:
        tp.where_or_what(model, TOKENS[:1], progress=False)
    assert str(refused.value) in document.text
    check_grey(document)
    assert len(document.rows("heads-r")) == 40


def check_grey(document: Document) -> None:
    """No head has a verdict, in the map or in its panel, and all have the numbers of other sections."""
    (heat,) = document.drawn("What the contribution needs, by head; grey: ")
    assert np.isnan(np.array(heat["z"], dtype=float)).all()
    assert "verdict" not in document.rows("atlas")[0]
    says = [one["says"] for one in document.data["panels"]["heads"].values()]
    assert says
    assert all(x[0].startswith("Of the variance of its scores") for x in says)


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
    assert f"report(model, tokens, 'report.html', sections={list(SECTIONS)!r}, control=2, seed=5)" in document.text
    assert f"tl_posdisent {tp.__version__}" in document.text


def test_the_same_again_byte_for_byte_and_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tp.load_demo_model()
    options: dict[str, Any] = {
        "layers": [3],
        "heads": [5, 2],
        "progress": False,
        "control": 1,
    }
    names = ["additivity", "heads"]
    pages = [tp.report(model, TOKENS, tmp_path / n / "r.html", sections=names, **options) for n in "ab"]
    assert pages[0].read_bytes() == pages[1].read_bytes()
    document = Document(pages[0])
    assert [row["head"] for row in document.rows("heads-r")] == ["L3H2", "L3H5"]
    assert [row["this model"] for row in document.rows("headline")].count("not requested") == 2
    assert not {"shares", "distance", "ablation"} & {a.get("id") for _, a in document.attributes}
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["a", "r.html", "b", "r.html"]
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_long_texts_are_cut_and_it_is_said(tmp_path: Path) -> None:
    model, text = tp.load_demo_model(), tp.demo_text()
    options: dict[str, Any] = {"sections": ["additivity"], "layers": [4], "control": 0, "progress": False}
    document = Document(tp.report(model, text, tmp_path / "string.html", **options))
    given = model.to_tokens(text, truncate=False).shape[1]
    length = (given - 1) // -(-(given - 1) // 255)  # stretches of at most 256, each behind <|endoftext|>
    assert f"8 texts of {length + 1} tokens, of {given} tokens given" in document.text
    rows = model.to_tokens(text, truncate=False)[0, 1 : 1 + 8 * length].view(8, length)
    tokens = torch.cat([torch.zeros(8, 1, dtype=torch.long), rows], 1)
    table = tp.additivity(model, tokens, layers=[4], progress=False).groupby(HEAD, as_index=False).mean()
    agrees(document, "heads-r", {"r": "r"}, table)

    ids = tp.demo_tokens(length=520)
    document = Document(tp.report(model, ids, tmp_path / "ids.html", **options))
    assert "1 text of 512 tokens, of 520 tokens given" in document.text
    agrees(document, "heads-r", {"r": "r"}, tp.additivity(model, ids[:, :512], layers=[4], progress=False))


@pytest.mark.parametrize(("kind", "name"), zoo.cases("gpt2"))
def test_without_rotary_embeddings_there_are_reasons(
    kind: str, name: str, shared_model: Callable[[str, str], Any], tmp_path: Path
) -> None:
    model, tokens = shared_model(kind, name), zoo.random_tokens(length=24)
    sections: Any = ["where_or_what", "additivity", "shares", "subspaces", "perturbation", "heads"]
    options: Any = {"sections": sections, "control": 0, "progress": False}
    document = Document(tp.report(model, tokens, tmp_path / "report.html", **options))
    assert document.wrong == []
    assert "Traceback" not in document.source
    assert document.text.count("Not for this model.") == 3
    for tool in ("controlled_distance", "subspace_patterns"):
        assert f"{tool} needs rotary position embeddings (RoPE)" in document.text
    assert "where_or_what needs rotary position embeddings (RoPE)" in document.text
    check_grey(document)
    assert "Mean attention with every key at distance 5: " in document.text  # and why there is none
    assert "rotary embeddings: none" in document.text
    assert {row["kind"] for row in document.rows("perturbation")} == {"order"}
    assert "Only the order of the text: " in document.text
    assert [row["this model"] for row in document.rows("headline")][:2] == ["not for this model"] * 2
    table = tp.additivity(model, tokens, progress=False).groupby(HEAD, as_index=False).mean()
    agrees(document, "heads-r", {"r": "r", "key alone": "share_key"}, table)
    with pytest.raises(ValueError, match="requested sections can be measured: controlled_distance needs rotary"):
        tp.report(model, tokens, tmp_path / "none.html", sections=["shares", "subspaces"], progress=False)
    assert not (tmp_path / "none.html").exists()


@pytest.mark.skipif(zoo.TL_MAJOR >= 4, reason="HookedTransformer was removed in TransformerLens 4")
def test_in_both_directions(tmp_path: Path) -> None:
    """Distances below 0, and no next token to foresee."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    sizes = {"n_layers": 2, "n_heads": 3, "d_model": 24, "d_head": 8, "d_mlp": 32, "n_ctx": 32, "d_vocab": 61}
    config = HookedTransformerConfig(**sizes, act_fn="relu", attention_dir="bidirectional", seed=0)
    model = HookedTransformer(config).eval()
    tokens = zoo.random_tokens()
    document = Document(tp.report(model, tokens, tmp_path / "r.html", progress=False))
    assert document.wrong == []
    assert "in both directions" in document.text
    assert "model must be causal" in document.text
    fit = tp.fit_additive(tp.capture(model, tokens, layers=[0])[0].scores, mask="full", pool=True)
    for line, profile in zip(document.drawn("the heads of layer 0"), fit.distance, strict=True):
        assert list(line["customdata"]) == fit.distances.tolist()
        assert list(line["y"]) == pytest.approx(profile.tolist())


def test_hooks_of_the_user_are_measured(tmp_path: Path) -> None:
    model = tp.load_demo_model()
    with model.hooks(fwd_hooks=tp.dummy_distance(model, 3, layers=[4])):
        path = tp.report(model, TOKENS, tmp_path / "r.html", sections=["additivity"], control=0, progress=False)
        table = over_texts(model)
    agrees(Document(path), "heads-r", {"r": "r", "distance alone": "share_distance"}, table)
    plain = over_texts(model)
    assert (plain["r"] - table["r"]).abs().max() > 0.01


def test_what_has_no_answer_is_not_given_one(tmp_path: Path) -> None:
    """Scores that do not vary, a text in which 5 % is less than one token, a head without which nothing is worse."""
    model = tp.load_demo_model()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if re.search(r"W_Q|\bq(_proj)?\b.*weight", name):
                weights.zero_()
    names = ["additivity", "heads", "perturbation", "ablation"]
    options: dict[str, Any] = {"sections": names, "layers": [2], "heads": [3], "control": 0, "progress": False}
    document = Document(tp.report(model, TOKENS[:, :12], tmp_path / "report.html", **options))
    assert document.wrong == []
    assert document.rows("headline")[2]["this model"] == "undefined: no head’s scores vary"
    assert "Exchanging 5 % of neighbours" not in document.text
    effect = tp.head_ablation(model, TOKENS[:, :12], layers=[2], heads=[3], progress=False)["effect"].item()
    assert ("Ablating a single head never raises the loss" in document.text) == (effect <= 0)
    assert as_number(document.rows("heads-r")[0]["r"]) != as_number(document.rows("heads-r")[0]["r"])  # NaN
    assert "no head has scores that vary" in document.text
