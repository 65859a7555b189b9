"""Sentences of the report follow from its data: for data that say the opposite, so does the sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from tl_posdisent.page.names import SectionName
from tl_posdisent.page.sections import SECTIONS
from tl_posdisent.rope import COMPONENTS

NAN = float("nan")


def heads(n: int = 4, **columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"layer": [k // 2 for k in range(n)], "head": [k % 2 for k in range(n)], **columns})


def said(name: SectionName, trained: pd.DataFrame, random: pd.DataFrame | None = None) -> str:
    return " ".join(SECTIONS[name].show(trained, random).sentences)


def additive(r: Any, distance: float, key: float, **columns: Any) -> pd.DataFrame:
    return heads(r=r, share_distance=distance, share_key=key, share_query=0.0, **columns)


def parts(where: list[float], what: list[float], verdicts: list[str]) -> pd.DataFrame:
    """A table of ``where_or_what``."""
    table = heads(
        where_part=where, what_part=what, joint=0.0, verdict=verdicts, open="", contribution=[0.4, 0.3, 0.2, 0.1]
    )
    table["neither_part"] = 1 - table["where_part"] - table["what_part"]
    table = table.assign(where_part_se=0.04, what_part_se=[0.01, 0.02, 0.04, 0.05])
    table.attrs["answer"] = "Of what 4 heads contribute, 10 ± 1 % depends on where keys are."
    return table


def test_what_heads_need_is_stated_beside_random_copies() -> None:
    table = parts([0.9, 0.1, 0.4, 0.5], [0.1, 0.9, 0.4, 0.2], ["where", "what", "mixed", "undecided"])
    alone = said("where_or_what", table)
    assert alone == (
        f"{table.attrs['answer']} Here ± is a standard error over texts. The median error of a "
        "single head that contributes is 0.04 for where and 0.03 for what."
    )
    counted, _ = SECTIONS["where_or_what"].show(table, None).table or (table, "")
    assert counted.drop(columns="share").to_numpy().tolist() == [
        ["where", 1, "L0H0"],
        ["what", 1, "L0H1"],
        ["mixed", 1, "L1H0"],
        ["undecided", 1, "L1H1"],
    ]
    random = parts([0.1, 0.2, 0.0, 0.0], [0.05] * 4, ["neither", "neither", "neither", "not used"])
    beside = said("where_or_what", table, random)
    copy = (
        "With random weights, 3 of 4 heads contribute measurably: where 0.10 (0.01 to 0.19), what 0.05 (0.05 to 0.05)"
    )
    assert f"{copy}, neither 0.85 (0.76 to 0.94) (medians, and from 5 to 95 % of the heads): 3 neither." in beside
    nothing = random.assign(verdict="not used")
    beside = said("where_or_what", nothing, nothing)
    assert beside.endswith("error over texts. With random weights, none of 4 heads contributes measurably.")


def test_shares_are_stated_beside_those_of_random_weights() -> None:
    table = additive(0.9, 0.7, 0.1)
    shares = "Of the variance of a head’s scores, the distance alone explains 70 % and the key alone 10 % on average"
    assert said("additivity", table) == f"{shares}."
    random = table.assign(share_distance=0.25, share_key=0.5, seed=0)
    assert f"{shares}; with random weights 25 % and 50 %." in said("additivity", table, random)
    assert said("additivity", additive(NAN, NAN, NAN)) == "No head has scores that vary in these texts."


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
    about = " ".join(SECTIONS["shares"].about.split())
    kinds = {name: sums_with(name) for name in COMPONENTS}
    assert [name for name, (three, _) in kinds.items() if three] == ["distance", "query", "key"]
    also = [name.replace(":", " × ") for name, (three, two) in kinds.items() if two and not three]
    neither = [name.replace(":", " × ") for name, (_, two) in kinds.items() if not two]
    assert "one of query plus one of key, a sum without interactions." in about
    assert f"it also has the interactions {' and '.join(also)}." in about
    assert f"The two on top, {' and '.join(neither)}, are in neither sum." in about


@pytest.mark.parametrize("r", [0.9, 0.3])
def test_heads_are_counted_that_are_above_the_highest_random_head_of_their_layer(r: float) -> None:
    """Of layer 0 neither head of r .3 is above the .6 of the second copy, of layer 1 both are above .2."""
    copies = [additive(x, 0.1, 0.1, seed=n) for n, x in enumerate(([0.1, 0.1, 0.2, 0.2], [0.6, 0.1, 0.2, 0.2]))]
    random = pd.concat(copies)
    beside = said("additivity", additive(r, 0.2, 0.1), random)
    assert f"is {r:.2f} on average, that of random weights 0.21 ± 0.06 (2 random copies; ± is" in beside
    assert "± is a standard error over copies); above the highest random head" in beside
    assert f"of their layer: {'4 of 4 heads.' if r == 0.9 else '2 of 4 heads, all but L0H0, L0H1.'}" in beside
    few = additive([0.1, 0.1, 0.1, 0.3], 0.2, 0.1)
    assert "of their layer: 1 of 4 heads, L1H1." in said("additivity", few, random)
    shares = {name: 1 / len(COMPONENTS) for name in COMPONENTS}
    both = [
        x.rename(columns={"r": "r_two_axis"}).assign(r_three_axis=0.1, **shares) for x in (additive(r, 0, 0), random)
    ]
    assert f"r of the two-axis model is {r:.2f} on average, that of" in said("shares", *both)
    assert said("shares", both[0]) == ""  # nothing to compare with


def test_how_sure_means_are_is_said() -> None:
    """Two texts and two copies: errors over both."""
    rows = pd.concat([additive(x, 0.7, 0.1, batch=n) for n, x in enumerate((0.9, 0.7))])
    random = pd.concat([rows.assign(r=r, seed=n) for n, r in enumerate((0.2, 0.4))])
    beside = said("additivity", rows, random)
    assert "is 0.80 ± 0.10 on average, that of random weights 0.30 ± 0.10 (2 texts, 2 random copies;" in beside
    assert "± is a standard error over texts and copies)" in beside
    alike = pd.concat([rows.assign(r=0.3 + 0.002 * n, seed=n) for n in range(2)])
    assert "that of random weights 0.301 ± 0.001 (2 texts," in said("additivity", rows, alike)  # not ± 0.00


@pytest.mark.parametrize("both", [True, False])
def test_that_labels_overlap_is_said_if_they_do(both: bool) -> None:
    labels = ["induction+duplicate_token" if both else "induction", "", "first_token", "induction"]
    sentence = said("labels", heads(label=labels))
    assert "3 of 4 heads have a label" in sentence
    assert "2 induction" in sentence
    assert ("1 duplicate token" in sentence) == sentence.endswith("; a head can have several.") == both
    assert said("labels", heads(label=[""] * 4)) == "None of 4 heads has a label, by the keys that they attend to."


def test_profiles_that_vary_most_are_named() -> None:
    table = heads().merge(pd.DataFrame({"distance": range(3)}), how="cross")
    table["value"] = table["distance"] * (2.0 * table["layer"] + table["head"])  # 0, 1, 2 and 3 times the distance
    named = "varies most in L1H1 (3.00), L1H0 (2.00), L0H1 (1.00): standard deviations over distances"
    assert named in said("distance", table)
    assert said("distance", table).endswith("the median of 4 heads is 1.50.")
    assert said("distance", table[table["distance"] == 1]) == ""


@pytest.mark.parametrize("sign", [1, -1])
def test_ablation_and_perturbation_have_the_sign_of_the_data(sign: int) -> None:
    sentence = said("ablation", heads(effect=[sign * x for x in (0.5, 0.02, 0.001, 0.3)]))
    if sign > 0:
        assert "Ablating L0H0 raises the loss most, by 0.500" in sentence
        assert "of 4 heads, 3 raise it by more than 0.01 when ablated alone" in sentence
    else:
        assert "Ablating a single head never raises the loss" in sentence
    curve = pd.DataFrame({"kind": ["order", "index"], "fraction": 0.05, "moved": 0.04, "kl": 0.1, "perplexity": 1.0})
    curve = curve.assign(added_loss=[sign * 0.2, sign * 0.1], added_loss_se=[0.01, NAN], accuracy=0.5, draws=2)
    sentence = said("perturbation", curve)
    draws = ("+0.190 and +0.210", "+0.100") if sign > 0 else ("−0.210 and −0.190", "−0.100")  # mean ∓ error; one draw
    assert f"in 2 draws of the pairs: tokens of the text {draws[0]}; positions {draws[1]}." in sentence
    assert said("perturbation", curve.assign(moved=0)) == ""
