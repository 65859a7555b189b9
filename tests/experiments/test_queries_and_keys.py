"""Measures of a model are those of the vectors that it computes, and their shares are those of other tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from support import zoo

from tl_posdisent import capture, controlled_distance, positional_symbolic, preference_flips, subspace_patterns
from tl_posdisent.rope import positional_symbolic_qk, preference_flips_qk, subspace_patterns_qk

Model = Callable[[str, str], Any]
TOKENS = zoo.random_tokens(length=12, batch=2)
CASES = zoo.cases("llama-gqa", "gptj", "olmo2", "gemma2")
FLIPS: dict[str, Any] = {"near": [0, 1, 2], "far": [5, 9]}
Q_ROWS = {0: [0, 4, 7, 11], 4: [0, 2, 5, 7]}  # four of the queries that are left by the sinks, evenly spaced

OF_VECTORS: dict[str, tuple[Callable[..., pd.DataFrame], dict[str, Any], Callable[..., pd.DataFrame]]] = {
    "flips": (preference_flips, FLIPS, lambda q, k, spec: preference_flips_qk(q, k, spec.rotary, **FLIPS)),
    "flips of some queries": (
        preference_flips,
        FLIPS | {"queries": 4},
        lambda q, k, spec: preference_flips_qk(q[:, Q_ROWS[12 - q.shape[1]]], k, spec.rotary, **FLIPS),
    ),
    "plane": (positional_symbolic, {}, lambda q, k, spec: positional_symbolic_qk(q, k, spec.rotary)),
    "plane by subspace": (
        positional_symbolic,
        {"by_subspace": True},
        lambda q, k, spec: positional_symbolic_qk(q, k, spec.rotary, by_subspace=True),
    ),
    "patterns": (
        subspace_patterns,
        {},
        lambda q, k, spec: subspace_patterns_qk(q, k, spec.rotary, range(12), scale=spec.scale),
    ),
}


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.parametrize("what", OF_VECTORS)
def test_tables_are_those_of_captured_vectors(what: str, kind: str, name: str, shared_model: Model) -> None:
    model, (tool, options, of_vectors) = shared_model(kind, name), OF_VECTORS[what]
    for sinks in (0, 4):
        table = tool(model, TOKENS, sinks=sinks, progress=False, **options)
        assert table.columns.tolist()[: table.columns.tolist().index("head") + 1][-2:] == ["layer", "head"]
        for layer in capture(model, TOKENS, scores=False):
            expected = of_vectors(layer.q[:, sinks:], layer.k[:, sinks:], layer.spec)
            found = table[table["layer"] == layer.layer].drop(columns="layer").reset_index(drop=True)
            pd.testing.assert_frame_equal(found, expected)


def test_default_distances_of_flips(shared_model: Model) -> None:
    model = shared_model("bridge", "llama-gqa")
    got = preference_flips(model, TOKENS, layers=1, progress=False)
    wanted = preference_flips(model, TOKENS, near=range(8), far=[8, 9, 10, 11, 13, 14, 15], layers=1, progress=False)
    pd.testing.assert_frame_equal(got, wanted)
    assert got["near_far"].std() > 1e-3


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_shares_are_those_of_controlled_distance(kind: str, name: str, shared_model: Model) -> None:
    model, options = shared_model(kind, name), {"distances": [0, 1, 30], "sinks": 2, "progress": False}
    parts = subspace_patterns(model, TOKENS, **options).groupby(["layer", "head"])[["distance", "interaction"]].sum()
    whole = controlled_distance(model, TOKENS, **options).set_index(["layer", "head"])
    pd.testing.assert_series_equal(parts["distance"], whole["distance"], rtol=1e-9, atol=1e-12)
    mixed = whole[["distance:query", "distance:key", "distance:query:key"]].sum(axis=1)
    pd.testing.assert_series_equal(parts["interaction"], mixed, check_names=False, rtol=1e-9, atol=1e-12)
