"""Patterns of a model are those of the vectors that it computes, and their shares are those of controlled distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from support import zoo

from tl_posdisent import capture, controlled_distance, subspace_patterns
from tl_posdisent.rope import subspace_patterns_qk

Model = Callable[[str, str], Any]
TOKENS = zoo.random_tokens(length=12, batch=2)
CASES = zoo.cases("llama-gqa", "gptj", "olmo2", "gemma2")


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_tables_are_those_of_captured_vectors(kind: str, name: str, shared_model: Model) -> None:
    model = shared_model(kind, name)
    for sinks in (0, 4):
        table = subspace_patterns(model, TOKENS, sinks=sinks, progress=False)
        assert table.columns.tolist()[:2] == ["layer", "head"]
        for layer in capture(model, TOKENS, scores=False):
            q, k, spec = layer.q[:, sinks:], layer.k[:, sinks:], layer.spec
            expected = subspace_patterns_qk(q, k, spec.rotary, range(12), scale=spec.scale)
            found = table[table["layer"] == layer.layer].drop(columns="layer").reset_index(drop=True)
            pd.testing.assert_frame_equal(found, expected)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_shares_are_those_of_controlled_distance(kind: str, name: str, shared_model: Model) -> None:
    model, options = shared_model(kind, name), {"distances": [0, 1, 30], "sinks": 2, "progress": False}
    parts = subspace_patterns(model, TOKENS, **options).groupby(["layer", "head"])[["distance", "interaction"]].sum()
    whole = controlled_distance(model, TOKENS, **options).set_index(["layer", "head"])
    pd.testing.assert_series_equal(parts["distance"], whole["distance"], rtol=1e-9, atol=1e-12)
    mixed = whole[["distance:query", "distance:key", "distance:query:key"]].sum(axis=1)
    pd.testing.assert_series_equal(parts["interaction"], mixed, check_names=False, rtol=1e-9, atol=1e-12)
