"""The table of preference flips of a model: those of its own queries and keys."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo

from tl_posdisent import capture, preference_flips
from tl_posdisent.rope import preference_flips_qk

TOKENS = zoo.random_tokens(length=12, batch=2)


@pytest.mark.parametrize(("kind", "name"), [*zoo.cases("llama-gqa"), ("bridge", "qwen3"), ("bridge", "phi")])
def test_numbers_are_those_of_the_vectors(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    table = preference_flips(model, TOKENS, near=[0, 1, 2], far=[5, 9], sinks=1, queries=4, progress=False)
    assert list(table.columns) == ["batch", "layer", "head", "near", "far", "near_far"]
    for layer in capture(model, TOKENS, scores=False):
        found = preference_flips_qk(layer.q[:, [1, 4, 8, 11]], layer.k[:, 1:], layer.spec.rotary, [0, 1, 2], [5, 9])
        own = table[table["layer"] == layer.layer].sort_values(["batch", "head"])
        for column in ("near", "far", "near_far"):
            assert own[column].tolist() == pytest.approx(getattr(found, column).flatten().tolist())
    assert table["near_far"].std() > 1e-3


def test_padded_texts_are_measured_alone(shared_model: Any) -> None:
    model, mask = shared_model("bridge", "llama-gqa"), torch.ones_like(TOKENS)
    mask[0, :4] = 0
    got = preference_flips(model, TOKENS, attention_mask=mask, far=[8, 11], progress=False)
    alone = [preference_flips(model, x, far=[8, 11], progress=False) for x in (TOKENS[:1, 4:], TOKENS[1:])]
    wanted = pd.concat([alone[0], alone[1].assign(batch=1)]).sort_values(["layer", "batch", "head"])
    pd.testing.assert_frame_equal(
        got.sort_values(["layer", "batch", "head"], ignore_index=True), wanted.reset_index(drop=True)
    )


def test_default_distances_and_refusals(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    got = preference_flips(model, TOKENS, layers=1, progress=False)
    wanted = preference_flips(model, TOKENS, near=range(8), far=[8, 9, 10, 11, 13, 14, 15], layers=1, progress=False)
    pd.testing.assert_frame_equal(got, wanted)
    for options, words in (
        ({"near": "0"}, "near must be finite real numbers"),
        ({"near": [0, 9], "far": [9]}, "no distance twice"),
        ({"queries": 0}, "queries must"),
        ({"sinks": 11}, "sinks must be an integer from 0 to 10"),
    ):
        with pytest.raises(ValueError, match=words):
            preference_flips(model, TOKENS, progress=False, **options)
