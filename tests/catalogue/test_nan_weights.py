"""One weight that is NaN or infinite: tools refuse the model in words, also where its class hides it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import zoo

import tl_posdisent as tp
from tl_posdisent.experiments import positional_subspace

TOKENS = zoo.random_tokens()


def broken(kind: str, name: str, value: float) -> Any:
    """With one such weight in the queries of its second layer."""
    model = zoo.load(kind, name)
    with torch.no_grad():
        query = model.blocks[1].attn.W_Q if kind == "hooked" else model.blocks[1].attn.q.weight
        query.view(-1)[0] = value
    return model


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_a_layer_whose_scores_are_not_finite(kind: str) -> None:
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"layer 1 |must be finite"):
            tp.additivity(broken(kind, "llama-gqa", value), TOKENS)


def test_a_token_whose_embedding_is_not_finite() -> None:
    model = zoo.hooked("llama-gqa")
    with torch.no_grad():
        model.embed.W_E[TOKENS[0, 4], 3] = math.nan
    with pytest.raises(ValueError, match="residual stream must be finite"):
        positional_subspace(model, TOKENS, 0)
