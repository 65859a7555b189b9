"""Random copies beside a model: one table, drawn once for all measures; the sentence on heads above random heads."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd
import pytest
from support import zoo

from tl_posdisent import additivity, controlled_distance, random_control
from tl_posdisent.experiments.measuring import random_copies as module
from tl_posdisent.experiments.measuring.random_copies import above_random, beside_random

TOKENS = zoo.random_tokens()


def test_rows_are_those_of_each_copy_drawn_once(shared_reading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, drawn = shared_reading("bridge", "llama-gqa"), []

    def counted(*arguments: Any, **options: Any) -> Any:
        for copy in random_control(*arguments, **options):
            drawn.append(copy)
            yield copy

    monkeypatch.setattr(module, "random_control", counted)
    measures = {x.__name__: partial(x, tokens=TOKENS, progress=False) for x in (additivity, controlled_distance)}
    found = beside_random(reading, measures, [3, 5], 0.1)
    assert len(drawn) == 2
    for name, measure in measures.items():
        copies = [measure(copy).assign(weights="random", seed=seed) for seed, copy in zip([3, 5], drawn, strict=True)]
        expected = pd.concat([measure(reading).assign(weights="trained", seed=pd.NA), *copies], ignore_index=True)
        pd.testing.assert_frame_equal(found[name], expected.astype({"seed": "Int64"}))


def heads(r: list[float]) -> pd.DataFrame:
    """Two heads in each layer."""
    return pd.DataFrame({"layer": [n // 2 for n in range(len(r))], "head": [n % 2 for n in range(len(r))], "r": r})


def test_heads_without_a_value_or_a_baseline_are_left_out() -> None:
    nan = float("nan")
    trained, random = heads([0.9, 0.2, 0.9, nan, 0.9, 0.8]), heads([0.1, 0.3, 0.5, 0.5, nan, nan])
    said = above_random(trained, random.assign(seed=0), "r")
    assert said == "above the highest random head of their layer: 2 of 3 heads, all but L0H1"
