"""The sentence on heads above random heads."""

from __future__ import annotations

import pandas as pd

from tl_posdisent.experiments.measuring.above_random import above_random


def heads(r: list[float]) -> pd.DataFrame:
    """Two heads in each layer."""
    return pd.DataFrame({"layer": [n // 2 for n in range(len(r))], "head": [n % 2 for n in range(len(r))], "r": r})


def test_heads_without_a_value_or_a_baseline_are_left_out() -> None:
    nan = float("nan")
    trained, random = heads([0.9, 0.2, 0.9, nan, 0.9, 0.8]), heads([0.1, 0.3, 0.5, 0.5, nan, nan])
    said = above_random(trained, random.assign(seed=0), "r")
    assert said == "above the highest random head of their layer: 2 of 3 heads, all but L0H1"
