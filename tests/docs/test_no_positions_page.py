"""What the page on attention without rotation says of its tables."""

from __future__ import annotations

import pandas as pd
import pytest
from support.pages import ROOT

FIGURES = ROOT / "docs" / "figures"


def test_the_page_says_what_the_tables_say() -> None:
    tables = {model: pd.read_csv(FIGURES / model / "without_rotation.csv") for model in ("smollm2", "gemma3")}
    values = {
        (model, measure): table[table["measure"] == measure].groupby("change")["value"]
        for model, table in tables.items()
        for measure in ("prose", "second copy")
    }
    for model in tables:
        prose = values[model, "prose"].mean()
        assert round(prose["unchanged"] + prose["all layers"], 1) == 5.5
        assert prose["distances plus 4"] > prose["all layers"]
        for measure in ("prose", "second copy"):
            least, most = values[model, measure].min(), values[model, measure].max()
            assert least["heads, most previous_token"] > most["random heads of the layers with most previous_token"]
            assert least["heads, most induction"] <= most["random heads of the layers with most induction"]
    assert values["smollm2", "prose"].min()["every fourth layer"] > values["smollm2", "prose"].max()["random fourth"]
    assert values["gemma3", "prose"].max()["global layers"] < values["gemma3", "prose"].min()["random local layers"]
    assert (
        values["gemma3", "second copy"].min()["global layers"]
        > (values["gemma3", "second copy"].max()["random local layers"])
    )
    single = tables["smollm2"].query("change == 'one layer' and measure == 'second copy'")
    assert single.loc[single["value"].idxmax(), "where"] == "16"


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_without_rotation_the_answer_is_neither_that_of_the_needle_nor_a_word_of_the_text(model: str) -> None:
    table = pd.read_csv(FIGURES / model / "needles.csv")
    table = table.set_index(["measure", "positions", "change"]).sort_index()
    for positions in ("256 tokens", "512 tokens"):
        other, absent, share = (
            table.loc[(f"answer {measure}", positions)] for measure in ("minus other", "minus absent", "over other")
        )
        assert other.loc["unchanged", "value"] > 4 * other.loc["unchanged", "se"]
        assert share.loc["all layers", "value"] == 0.5
        for each in (other, absent):
            assert abs(each.loc["all layers", "value"]) < 2 * each.loc["all layers", "se"]
            assert each.loc["every fourth layer", "value"] > 4 * each.loc["every fourth layer", "se"]
    if model == "smollm2":  # the same word in both texts of each pair
        assert share.loc["every fourth layer", ["value", "se"]].tolist() == [0.5, 0]


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_needles_are_those_of_the_page_on_retrieval(model: str) -> None:
    found = pd.read_csv(FIGURES / model / "needles.csv").query("positions == '256 tokens'")
    page = pd.read_csv(FIGURES / model / "retrieval_rotation.csv").query("length == 256")
    page = page.set_index("change").loc["unchanged"]
    rows = found[found["change"] == "unchanged"].set_index("measure")
    assert rows.loc["answer minus other", ["value", "se", "pairs"]].tolist() == pytest.approx(
        page[["difference", "se", "pairs"]].tolist(), abs=1e-4
    )
    assert rows.loc["answer over other", "value"] == page["right"]
