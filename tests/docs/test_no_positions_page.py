"""What the page on attention without rotation says of its tables."""

from __future__ import annotations

import pandas as pd
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
        assert prose["distances plus 4"] > prose["all layers"] > prose["distances at most 4"]
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
