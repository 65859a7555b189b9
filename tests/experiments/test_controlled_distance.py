"""Controlled distance at a model: against the dense tensor of its queries and keys, its hooks, and known figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.rotary_layers import all_scores, anova
from torch import Tensor

from tl_posdisent import capture, controlled_distance, subspace_patterns
from tl_posdisent.rope import COMPONENTS

Model = Callable[[str, str], Any]
CASES = zoo.cases("llama-gqa", "gptj", "olmo2", "gemma2")
TOKENS = zoo.random_tokens(length=10, batch=2)
ROTARY_TOOLS = [controlled_distance, subspace_patterns]


def dense(model: Any, layer: int, distances: Any, sinks: int = 0) -> Tensor:
    """``W[head, distance, query, key]`` from one layer's captured queries and keys."""
    (seen,) = capture(model, TOKENS, layers=[layer], scores=False)
    return all_scores(seen.q[:, sinks:], seen.k[:, sinks:], seen.spec.rotary, distances, seen.spec.scale)


def rows(table: pd.DataFrame, layer: int, column: str) -> Tensor:
    """One column of one layer, by head."""
    return torch.tensor(table[table["layer"] == layer].sort_values("head")[column].tolist())


# --- controlled_distance ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_equals_the_dense_tensor(kind: str, name: str, shared_model: Model) -> None:
    model, distances, sinks = shared_model(kind, name), [0, 1, 2, 5, 40.5], 3
    table = controlled_distance(model, TOKENS, distances=distances, sinks=sinks, progress=False)
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    assert table[["layer", "head"]].values.tolist() == [[x, h] for x in range(n_layers) for h in range(n_heads)]
    for layer in range(n_layers):
        scores = dense(model, layer, distances, sinks)
        expected = anova(scores)
        total = scores.var((1, 2, 3), correction=0)
        torch.testing.assert_close(rows(table, layer, "total"), total.float(), rtol=1e-6, atol=0)
        torch.testing.assert_close(rows(table, layer, "mean"), scores.mean((1, 2, 3)).float(), rtol=1e-5, atol=1e-5)
        for component in COMPONENTS:
            share = (expected[component] / total).float()
            torch.testing.assert_close(rows(table, layer, component), share, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("gpt2"))
@pytest.mark.parametrize("tool", ROTARY_TOOLS, ids=lambda tool: tool.__name__)
def test_without_rotation_the_architecture_is_named(kind: str, name: str, tool: Any, shared_model: Model) -> None:
    with pytest.raises(ValueError, match=rf"{tool.__name__} needs rotary .* layer 0 of GPT2LMHeadModel has no rotary"):
        tool(shared_model(kind, name), TOKENS, progress=False)


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_scores_of_distance_and_key_alone_are_additive(kind: str) -> None:
    """NeoX turns a part of each head. With one query for all, and keys that are alike in what turns, scores are
    ``f(distance) + c(key)`` exactly."""
    plain = zoo.hf_model("neox")
    heads, d_head = 8, plain.config.hidden_size // 8
    turned = int(d_head * plain.config.rope_parameters["partial_rotary_factor"])
    assert 0 < turned < d_head
    for block in plain.gpt_neox.layers:
        weight = block.attention.query_key_value.weight.data.view(heads, 3, d_head, -1)
        weight[:, 0] = 0  # queries are their bias
        weight[:, 1, :turned] = 0  # and so is what turns of the keys
    model = zoo.as_bridge(plain) if kind == "bridge" else zoo.as_hooked(plain)
    shares = controlled_distance(model, TOKENS, progress=False)
    assert shares["r_three_axis"].min() == pytest.approx(1, abs=1e-9)
