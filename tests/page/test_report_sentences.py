"""Sentences of the report follow from its data: for data that say the opposite, so does the sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support import zoo
from support.documents import Document

from tl_posdisent import demo_tokens, load_demo_model, page
from tl_posdisent.experiments.needs.where_or_what import statement
from tl_posdisent.page.drawing import opening
from tl_posdisent.page.measuring.measurement import Measurement
from tl_posdisent.page.measuring.subject import read_subject
from tl_posdisent.page.sections.all_sections import SECTIONS, verdict_sentences
from tl_posdisent.page.sections.show import show_section
from tl_posdisent.rope import COMPONENTS

NAN = float("nan")


def heads(n: int = 4, **columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"layer": [k // 2 for k in range(n)], "head": [k % 2 for k in range(n)], **columns})


def additive(r: float, distance: float, key: float) -> dict[Any, Measurement]:
    rows = heads(r=r, share_distance=distance, share_key=key, share_query=0.0)
    return {"additivity": Measurement(rows)}


def verdict(measurements: dict[Any, Measurement]) -> str:
    return opening.verdict(verdict_sentences(measurements))


def plain(page: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", "", page).split())


NUMBERS = {"contribution": 0.1, "contribution_se": 0.01, "exact": False, "content_distance": 1}


def needed(where: list[float], what: list[float], verdicts: list[str]) -> pd.DataFrame:
    """A table of ``where_or_what``."""
    shares = {f"{name}{end}": x for name, x in {"where": where, "what": what}.items() for end in ("", "_unclipped")}
    return heads(**shares, where_se=0.04, what_se=[0.01, 0.02, 0.04, 0.05], verdict=verdicts, **NUMBERS)


def test_what_heads_need_is_counted_beside_a_random_copy() -> None:
    table = needed([0.9, 0.1, 0.2, 0.5], [0.1, 0.9, 0.3, 0.5], ["where", "what", "both", "undecided"])
    said = plain(verdict({"where_or_what": Measurement(table)}))
    counts = "need: where keys are in 1 of 4 heads (25 % of the sum of their contributions), what they are in 1 (25 %)"
    assert counts in statement(table)
    assert statement(table).removesuffix(".") + " (where_or_what). The shares that survive" in said
    assert "have standard errors over texts of 0.04 and 0.03 (medians of the heads that contribute)." in said
    assert "random copy" not in said
    random = needed([0.9, 0.8, 1.0, 0.0], [0.95] * 4, ["neither", "neither", "neither", "not used"])
    said = plain(verdict({"where_or_what": Measurement(table, random)}))
    copy = (
        "In a random copy of the weights, 3 of 4 heads contribute measurably: distances alone keep 0.90 (0.81 to 0.99)"
    )
    assert f"{copy}, content alone 0.95 (0.95 to 0.95) (medians, and from 5 to 95 % of the heads): 3 neither." in said
    nothing = random.assign(verdict="not used")
    said = plain(verdict({"where_or_what": Measurement(nothing, nothing)}))
    assert "In a random copy of the weights, none of 4 heads contribute measurably." in said
    assert "standard errors" not in said


def test_shares_are_stated_beside_those_of_random_weights() -> None:
    measured = additive(0.9, 0.7, 0.1)["additivity"]
    shares = "the distance alone explains 70 % and the key alone 10 % on average"
    assert f"Of the variance of a head’s scores, {shares} (additivity)." in plain(verdict({"additivity": measured}))
    random = Measurement(measured.trained, measured.trained.assign(share_distance=0.25, share_key=0.5, seed=0))
    assert f"{shares}; with random weights 25 % and 50 % (additivity)." in plain(verdict({"additivity": random}))


def sums_with(component: str) -> tuple[bool, bool]:
    """Whether the three-axis and the two-axis sum can be a table that only this component makes, by least squares."""
    sizes = {"distance": 3, "query": 4, "key": 5}
    table = np.random.default_rng(0).normal(size=tuple(sizes.values()))
    for axis, name in enumerate(sizes):
        mean = table.mean(axis, keepdims=True)
        table = table - mean if name in component.split(":") else np.broadcast_to(mean, table.shape)
    at = dict(zip(sizes, np.indices(table.shape).reshape(3, -1), strict=True))
    one = {name: np.eye(size)[at[name]] for name, size in sizes.items()}
    two = [np.einsum("nx,ny->nxy", one["query"], one[other]).reshape(table.size, -1) for other in ("distance", "key")]
    designs = (np.hstack([*one.values()]), np.hstack(two))
    left = (table.ravel() - x @ np.linalg.lstsq(x, table.ravel(), rcond=None)[0] for x in designs)
    three_axis, two_axis = (bool(np.abs(x).max() < 1e-9) for x in left)
    return three_axis, two_axis


def test_which_interactions_the_sums_have() -> None:
    """As the report says under the shares of the variance."""
    said = plain((Path(page.__file__).parent / "drawing/templates/sections/shares.html").read_text(encoding="utf-8"))
    kinds = {name: sums_with(name) for name in COMPONENTS}
    assert [name for name, (three, _) in kinds.items() if three] == ["distance", "query", "key"]
    also = [name.replace(":", " × ") for name, (three, two) in kinds.items() if two and not three]
    neither = [name.replace(":", " × ") for name, (_, two) in kinds.items() if not two]
    assert "one of query plus one of key, a sum without interactions." in said
    assert f"it also has the interactions {' and '.join(also)}." in said
    assert f"The two on top, {' and '.join(neither)}, are in neither sum." in said


def climbed(kl: dict[str, float], mean: float = 0.5) -> pd.DataFrame:
    """A ladder of one head with these divergences, and 1 with uniform attention; standard errors of a tenth."""
    every = {"mean_output": mean, "uniform": 1.0, **kl, "untouched": 0.0}
    rows = pd.DataFrame({"rung": list(every), "kl": list(every.values()), "control": "none", "causal": True})
    return rows.assign(recovered_kl=1 - rows["kl"], error_kl=rows["kl"] / 10, se_kl=0.001, blocks=10)


@pytest.mark.usefixtures("unchecked")
def test_verdicts_of_the_ladder_are_counted(tmp_path: Path) -> None:
    rungs = ["first_token", "distance", "distance+sink", "static", "additive"]
    heads = []
    for n, enough in enumerate(["static", "additive", None, "distance+sink"]):
        good = len(rungs) if enough is None else rungs.index(enough)
        heads.append(climbed({rung: 0.5 if k < good else 0.01 for k, rung in enumerate(rungs)}).assign(head=n))
    heads.append(climbed({"first_token": 0.5, "distance": 0.05, "distance+sink": 0.05, "static": 0.01}).assign(head=4))
    none = climbed({}, mean=1e-4).assign(head=5)
    unsure = climbed({"static": 0.01}, mean=1e-3).assign(head=6)
    table = pd.concat([*heads, none, unsure]).assign(layer=3)
    said = plain(verdict({"ladder": Measurement(table)}))
    depend = "The predictions depend on {}, by more than 0.001 nats per token"
    assert depend.format("5 of 7 heads") + "; 1 is undecided (ladder)." in said
    counted = "1 distance, 1 static, 1 additive, 1 more than additive, 1 undecided"
    assert f"the 5 are: {counted}." in said
    assert "diverge by no more than 0.001 nats, at most 0.2 would be counted by chance on average." in said
    fields = {"tokens": [0, 1], "layers": [3], "heads": {3: list(range(7))}, "attention": {}}
    subject: Any = type("Subject", (), fields)()
    page = show_section(SECTIONS["ladder"], subject, Measurement(table)).html
    assert "diverge by less than 0.001 nats per token" in " ".join(page.split())
    path = tmp_path / "section.html"
    path.write_text(page)
    document = Document(path)
    (heat,) = document.drawn("Verdict")
    names = dict(zip(heat["colorbar"]["tickvals"], heat["colorbar"]["ticktext"], strict=True))
    drawn = [names[code] for code in heat["z"][0]]
    assert drawn == ["static", "additive", "more than additive", "distance", "undecided", "not used", "undecided"]
    of_static = heat["customdata"][0][0]
    low, high = ", ".join(f"{x} 50%" for x in rungs[:3]), ", ".join(f"{x} 99%" for x in rungs[3:])
    assert of_static.endswith(f"<br>recovered: {low}, {high}")
    gaps = [trace["z"][0] for trace in document.drawn("Gap")]
    assert np.nansum(gaps) == pytest.approx(7.0)
    (additive,) = [row for row in document.rows("ladder") if row["verdict"] == "additive"]
    assert (additive["head"], additive["gap (nats per token)"], additive["distance"]) == ("L3H1", "1.000", "0.500")
    assert "L3H5" not in {row["head"] for row in document.rows("ladder")}
    alone = Measurement(none.assign(layer=3))
    assert depend.format("none of 1 head") + " (ladder)." in plain(verdict({"ladder": alone}))
    assert "<table" not in show_section(SECTIONS["ladder"], subject, alone).html


@pytest.mark.parametrize("r", [0.9, 0.3])
def test_heads_are_counted_that_are_above_the_highest_random_head_of_their_layer(r: float) -> None:
    """Of layer 0 neither head of r .3 is above the .6 of the second copy, of layer 1 both are above .2."""
    chance = heads(r=[0.1, 0.1, 0.2, 0.2]).assign(seed=0), heads(r=[0.6, 0.1, 0.2, 0.2]).assign(seed=1)
    rows = heads(r=r, share_distance=0.2, share_key=0.1, share_query=0.0)
    of_chance = pd.concat(chance).assign(share_distance=0.1, share_key=0.1)
    said = plain(verdict({"additivity": Measurement(rows, of_chance)}))
    assert f"is {r:.2f} on average, that of random weights 0.21 ± 0.06 (2 random copies; ± is" in said
    assert "± is a standard error over copies); above the highest random head" in said
    assert "of their layer: 4 of 4 heads (" in said if r == 0.9 else "2 of 4 heads, all but L0H0, L0H1 (" in said
    few = heads(r=[0.1, 0.1, 0.1, 0.3], share_distance=0.2, share_key=0.1, share_query=0.0)
    assert "of their layer: 1 of 4 heads, L1H1 (" in plain(verdict({"additivity": Measurement(few, of_chance)}))
    found = Measurement(heads(r_two_axis=r), pd.concat(chance).rename(columns={"r": "r_two_axis"}))
    assert f"r of the two-axis model is {r:.2f} on average, that of" in plain(verdict({"shares": found}))


def test_what_random_weights_are_and_how_sure_means_are_is_said() -> None:
    """Two texts and two copies: errors over both."""
    rows = pd.concat([heads(r=0.9, batch=0), heads(r=0.7, batch=1)]).assign(
        share_distance=0.7, share_key=0.1, share_query=0
    )
    chance = [rows.assign(r=r, share_distance=0.1, share_key=0.6, seed=n) for n, r in enumerate((0.2, 0.4))]
    said = plain(verdict({"additivity": Measurement(rows, pd.concat(chance))}))
    assert "is 0.80 ± 0.10 on average, that of random weights 0.30 ± 0.10 (2 texts, 2 random copies;" in said
    assert "± is a standard error over texts and copies)" in said
    alike = [rows.assign(r=0.3 + 0.002 * n, seed=n) for n in range(2)]
    said = plain(verdict({"additivity": Measurement(rows, pd.concat(alike))}))
    assert "that of random weights 0.301 ± 0.001 (2 texts," in said  # not ± 0.00
    assert "Of 4 heads, the share of the distance alone is largest in" in said


@pytest.mark.parametrize(
    ("foreign", "said"),
    [
        (
            0.9,
            "−0.100 ± 0.004, so on average heads are less additive with their own keys",
        ),
        (
            0.81,
            "−0.010 ± 0.004, which these texts do not tell from 0",
        ),  # 2.2 errors of 6 texts
        (
            0.5,
            "+0.300 ± 0.004, so on average heads are more additive with their own keys",
        ),
    ],
)
def test_r_is_compared_with_that_of_scores_that_no_head_computes(foreign: float, said: str) -> None:
    alternating = enumerate((0.7, 0.9) * 3)
    texts = [heads(r=r, share_distance=0.2, share_key=0.1, share_query=0.0, batch=n) for n, r in alternating]
    for x, moved in zip(texts, (-0.01, 0.01) * 3, strict=True):
        x["r, foreign keys"] = x["r"] + foreign - 0.8 + moved
    page = plain(verdict({"additivity": Measurement(pd.concat(texts))}))
    assert f"computes, have an r of {foreign:.2f}: own minus" in page
    assert f"own minus other keys is {said.replace(',', ' (a standard error over texts),')}" in page
    one = plain(verdict({"additivity": Measurement(texts[0])}))  # without an error nothing is concluded
    assert re.search(r"own minus other keys is [+−]?0\.\d+ \(additivity\)", one)


def test_three_sentences_come_first() -> None:
    """One each of the first three sections that have any, in the order of the page; the others on request."""
    table = climbed({"static": 0.01}).assign(layer=0, head=0)
    effects = heads(effect=[0.5, 0.02, 0.001, 0.3])
    labelled = heads(label=["induction", "", "", ""])
    found = {
        "labels": Measurement(labelled),
        "ablation": Measurement(effects),
        "ladder": Measurement(table),
    } | additive(0.9, 0.7, 0.1)
    lead, more = verdict(found).split("<details>")
    first = [plain(sentence) for sentence in lead.split("<li>")[1:]]
    assert [sentence.split(" (")[-1] for sentence in first] == ["additivity).", "labels).", "ablation)."]
    assert "The predictions depend on" in plain(more)
    assert plain(more).count("share of the distance alone is largest") == 1
    assert "<details>" not in verdict({"ablation": Measurement(effects)})
    assert verdict({"labels": Measurement(heads(label=[""] * 4))}) == ""  # no sentence about zeros
    alone = plain(verdict({"ablation": Measurement(heads(effect=[0.005, 0.002, 0.001, 0.0]))}))
    assert alone == "Verdict Ablating L0H0 raises the loss most, by 0.005 nats per token (ablation)."


def test_nothing_is_claimed_without_data() -> None:
    assert verdict({}) == ""
    assert verdict({"ablation": Measurement(refused="no")}) == ""
    assert verdict({"shares": Measurement(heads(r_two_axis=0.5))}) == ""  # nothing to compare with
    assert "No head has scores that vary" in verdict(additive(NAN, NAN, NAN))
    short_text = pd.DataFrame({"kind": ["index"], "fraction": 0.05, "moved": 0, "added_loss": 0.0})
    assert verdict({"perturbation": Measurement(short_text)}) == ""


@pytest.mark.parametrize("both", [True, False])
def test_that_labels_overlap_is_said_if_they_do(both: bool) -> None:
    labels = ["induction+duplicate_token" if both else "induction", "", "first_token", "induction"]
    said = plain(verdict({"labels": Measurement(heads(label=labels))}))
    assert "3 of 4 heads have a label" in said
    assert "2 induction" in said
    assert ("1 duplicate token" in said) == ("; a head can have several (labels)" in said) == both


@pytest.mark.parametrize("sign", [1, -1])
def test_ablation_and_perturbation_have_the_sign_of_the_data(sign: int) -> None:
    drops = heads(effect=[sign * x for x in (0.5, 0.02, 0.001, 0.3)])
    said = plain(verdict({"ablation": Measurement(drops)}))
    if sign > 0:
        assert "Ablating L0H0 raises the loss most, by 0.500" in said
        assert "of 4 heads, 3 raise it by more than 0.01 when ablated alone" in said
    else:
        assert "Ablating a single head never raises the loss" in said
    curve = pd.DataFrame({"kind": ["order", "index"], "fraction": 0.05, "moved": 0.04})
    curve = curve.assign(added_loss=[sign * 0.2, sign * 0.1], added_loss_se=[0.01, NAN])
    said = plain(verdict({"perturbation": Measurement(curve)}))
    draws = ("+0.190 and +0.210", "+0.100") if sign > 0 else ("−0.210 and −0.190", "−0.100")  # mean ∓ error; one draw
    assert f"in 2 draws of the pairs: tokens of the text {draws[0]}; positions {draws[1]} (" in said


def test_a_model_from_a_folder_has_its_name(tmp_path: Path) -> None:
    (tmp_path / "Some-1B").mkdir()
    for backend in ("bridge", "hooked") if zoo.TL_MAJOR < 4 else ("bridge",):
        model: Any = load_demo_model(backend=backend)  # type: ignore[arg-type]
        subject = read_subject(model, demo_tokens(length=8))
        model.cfg.model_name, model.tokenizer.name_or_path = "custom", str(tmp_path / "Some-1B")
        assert subject.name() == "Some-1B"
