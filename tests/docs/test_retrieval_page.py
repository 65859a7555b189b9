"""What the page on retrieval heads says of its tables."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from support.pages import ROOT

MODELS = ("smollm2", "gemma3")


def table(model: str, study: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / "docs" / "figures" / model / f"retrieval_{study}.csv")


def test_the_largest_copying_is_of_heads_that_hardly_attend_to_the_word() -> None:
    for model, head in (("smollm2", (19, 1)), ("gemma3", (11, 2))):
        heads = table(model, "scores")
        first = heads.loc[heads["copying"].idxmax()]
        assert (first["layer"], first["head"]) == head
        assert first["attention"] < 0.1


@pytest.mark.parametrize("model", MODELS)
def test_random_heads_of_the_same_layers_cost_less(model: str) -> None:
    """Within two standard deviations over draws; the first heads leave less than any of that. Gemma gains by them."""
    cut = table(model, "knockout")
    cut = cut[cut["depth"].isna()].set_index(["by", "length", "ablated"])
    for by, length in cut.index.droplevel("ablated").unique():
        none, top, random = (cut.loc[(by, length, name)] for name in ("none", "top", "random"))
        assert random["difference"] > none["difference"] - 2 * random["sd"]
        assert (random["difference"] > none["difference"]) == (model == "gemma3")
        assert top["difference"] < none["difference"] / 4
        assert top["p"] < 0.02
    difference, se = cut.loc[("attention", 256, "top"), ["difference", "se"]]
    assert (difference < -2 * se) == (model == "gemma3")


def test_without_its_heads_smollm2_takes_the_word_of_the_last_needle() -> None:
    cut = table("smollm2", "knockout").query("ablated == 'top' and by == 'copying' and length == 256")
    first, last = (cut[cut["depth"] == depth].iloc[0] for depth in (0, 1))
    assert first["difference"] < -2 * first["se"]
    assert last["difference"] > 2 * last["se"]


@pytest.mark.parametrize("model", MODELS)
def test_far_keys_have_to_look_far(model: str) -> None:
    rows = table(model, "distances")
    rows = rows[rows["depth"].isna() & (rows["where"].isna() | rows["where"].eq("retrieval heads"))]
    for _, found in rows.groupby(["length", "seed"]):
        of = found.set_index("change")
        near, far = of.loc["16 exact, others 16"], of.loc["16 exact, others far"]
        errors = (far["se"] ** 2 + near["se"] ** 2) ** 0.5
        assert far["value"] - near["value"] > (2 if model == "smollm2" else 1) * errors
        assert abs(far["value"] - of.loc["unchanged", "value"]) < far["se"]


def test_slow_subspaces_carry_content() -> None:
    for model, length in (("smollm2", 256), ("smollm2", 512), ("gemma3", 256)):
        rows = table(model, "rotation")
        rows = rows[rows["length"] == length]
        own = rows.query("change == 'unchanged'").iloc[0]
        found: Any = rows.query("where == 'retrieval heads'").groupby("change")["difference"].agg(["min", "max"])
        other = rows.query("where == 'other heads'").set_index("change")["difference"]
        assert found.loc["slowest 0.25", "max"] < 0.02 < 0.2 < found.loc["as much energy as slowest 0.25", "min"]
        assert (other["slowest 0.25"] < 0.55 * own["difference"]) == (model == "smollm2")
        if model == "gemma3":
            assert found.loc["as much energy as slowest 0.5", "max"] < 0.23


def test_the_first_heads_copy_and_the_very_first_retrieves() -> None:
    rows = table("smollm2", "losses").set_index(["measure", "ablated"]).sort_index()["value"]
    prose, copies, needles = (
        rows[measure].groupby("ablated").agg(["min", "max"]) for measure in ("prose", "second copy", "needles")
    )
    assert prose.loc["first heads", "max"] < prose.loc["random heads", "min"]
    assert copies.loc["first heads, most induction", "min"] > 3 * copies.loc["first heads, others", "max"]
    assert copies.loc["first head", "max"] < copies.loc["random heads", "min"]
    assert needles["max"].max() == needles.loc["first head", "max"] < 0.7
