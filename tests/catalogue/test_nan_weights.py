"""One weight that is NaN or infinite: tools refuse the model in words, also where its class hides it."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from support import zoo
from support.public_calls import call, callables

pytestmark = pytest.mark.tl4

TOOLS = ["additivity", "head_ablation", "length_generalization", "substitute_attention"]


def broken(kind: str, name: str, value: float) -> Any:
    """With one such weight in the queries of its second layer."""
    model = zoo.load(kind, name)
    with torch.no_grad():
        query = model.blocks[1].attn.W_Q if kind == "hooked" else model.blocks[1].attn.q.weight
        query.view(-1)[0] = value
    return model


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("kind", zoo.KINDS)
def test_a_layer_whose_scores_are_not_finite(kind: str, tool: str) -> None:
    """In classes that attend to nothing where the pattern is NaN, also tools that look at the layer before alone."""
    function = callables()[tool]
    only = {"layers": [0]} if kind != "bridge" and "layers" in inspect.signature(function).parameters else {}
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"layer 1 .*NaN or infinite"):
            call(function, broken(kind, "llama-gqa", value), **only)


def test_a_token_whose_embedding_is_not_finite() -> None:
    model = zoo.hooked("llama-gqa")
    with torch.no_grad():
        model.embed.W_E[zoo.random_tokens()[0, 4], 3] = math.nan
    with pytest.raises(ValueError, match="residual stream must be finite"):
        call(callables()["positional_subspace"], model)
