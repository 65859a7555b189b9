"""Shapley values by brute force over orders."""

from __future__ import annotations

from itertools import combinations, permutations

import pandas as pd
import pytest
import torch

from tl_posdisent.experiments import shapley_values

PARTS = ("distance", "query", "key", "residual")
SUBSETS = [some for n in range(5) for some in combinations(PARTS, n)]
pytestmark = pytest.mark.usefixtures("unchecked")


def table_of(values: dict[tuple[str, ...], float]) -> pd.DataFrame:
    rows = [("all", "fit", "+".join(keep) or "mean", value, 2 * value) for keep, value in values.items()]
    other = [("all", "zero", "", 9.0, 9.0), ("layer", "fit", "distance+query+key", 8.0, 8.0)]
    return pd.DataFrame([*other, *rows[::-1]], columns=["scope", "put_in", "keep", "loss", "kl"])


def random_table(seed: int) -> tuple[pd.DataFrame, dict[tuple[str, ...], float]]:
    drawn = torch.randn(16, generator=torch.Generator().manual_seed(seed)).tolist()
    values = dict(zip(SUBSETS, drawn, strict=True))
    return table_of(values), values


@pytest.mark.parametrize("seed", range(3))
def test_shapley_values_are_the_means_over_all_orders(seed: int) -> None:
    table, values = random_table(seed)
    wanted = dict.fromkeys(PARTS, 0.0)
    for order in permutations(PARTS):
        for n, component in enumerate(order):
            before, after = (tuple(sorted(order[: n + m], key=PARTS.index)) for m in (0, 1))
            wanted[component] += (values[after] - values[before]) / 24
    got = shapley_values(table).set_index("component")
    assert got["value"].tolist() == pytest.approx([wanted[component] for component in PARTS], abs=1e-12)
    assert got["value"].sum() == pytest.approx(values[PARTS] - values[()], abs=1e-12)
    assert got.loc["key", "first"] == pytest.approx(values[("key",)] - values[()])
    assert got.loc["key", "last"] == pytest.approx(values[PARTS] - values[("distance", "query", "residual")])
    assert shapley_values(table, "kl")["value"].tolist() == pytest.approx((2 * got["value"]).tolist())


def test_incomplete_and_repeated_tables_are_refused() -> None:
    table, _ = random_table(0)
    with pytest.raises(ValueError, match=r"one row for each of the 16 subsets.*got 15 rows for 15"):
        shapley_values(table.drop(index=2))
    with pytest.raises(ValueError, match="got 32 rows for 16"):
        shapley_values(pd.concat([table, table]))
    with pytest.raises(ValueError, match="a table of additive_substitution, got \\['a'\\]"):
        shapley_values(pd.DataFrame({"a": [1]}))
