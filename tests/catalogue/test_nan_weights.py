"""One weight that is NaN or infinite: tools refuse the model in words, also where its class hides it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import zoo

import tl_posdisent as tp
from tl_posdisent.experiments import attention_by_distance, positional_subspace
from tl_posdisent.hooks import applied

TOKENS = zoo.random_tokens()
TOOLS: dict[str, Callable[[Any], Any]] = {
    "additivity": lambda model: tp.additivity(model, TOKENS, progress=False),
    "capture": lambda model: list(tp.capture(model, TOKENS)),
    "where_or_what": lambda model: tp.where_or_what(model, TOKENS, progress=False),
    "attention_by_distance": lambda model: attention_by_distance(model, TOKENS, progress=False),
    "head_labels": lambda model: tp.head_labels(model, TOKENS, progress=False),
    "score_sources": lambda model: tp.score_sources(model, TOKENS, "L1H0", 5),
    "an intervention": lambda model: applied_to(model, tp.dummy_distance(model, 5)),
}


def applied_to(model: Any, hooks: Any) -> None:
    with applied(model, hooks):
        model(TOKENS)


def broken(kind: str, name: str, value: float, of: str = "q") -> Any:
    """With one such weight in the queries (or values) of its second layer."""
    model = zoo.load(kind, name)
    attention = model.blocks[1].attn
    with torch.no_grad():
        weight = {"q": attention.W_Q, "v": attention._W_V}[of] if kind == "hooked" else getattr(attention, of).weight
        weight.view(-1)[0] = value
    return model


@pytest.mark.filterwarnings("ignore:texts have 12 tokens")
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", zoo.KINDS)
def test_a_layer_whose_scores_are_not_finite(kind: str, value: float) -> None:
    """Said before masks, padding and hooks, which may be right."""
    model = broken(kind, "llama-gqa", value)
    for run in TOOLS.values():
        with pytest.raises(ValueError, match=r"^scores .*(contain NaN|got nan).* the model's weights or .*activations"):
            run(model)


PREDICTIONS: dict[str, Callable[[Any], Any]] = {
    "where_or_what": TOOLS["where_or_what"],
    "describe_head": lambda model: tp.describe_head(model, TOKENS, "L1H0", progress=False),
    "attention_ladder": lambda model: tp.attention_ladder(model, TOKENS, layers=1, rungs=["uniform"], progress=False),
    "head_effects": lambda model: tp.head_effects(model, TOKENS, tp.dummy_distance(model, 5), progress=False),
}


@pytest.mark.filterwarnings("ignore:texts have 12 tokens")
@pytest.mark.parametrize("kind", zoo.KINDS)
def test_predictions_that_are_not_finite(kind: str) -> None:
    """By values: scores are finite, and no tool has a number to say."""
    model = broken(kind, "llama-gqa", math.nan, "v")
    for run in PREDICTIONS.values():
        with pytest.raises(ValueError, match=r"^logits contain NaN or inf: the model's weights or its activations do"):
            run(model)


def test_a_token_whose_embedding_is_not_finite() -> None:
    model = zoo.hooked("llama-gqa")
    with torch.no_grad():
        model.embed.W_E[TOKENS[0, 4], 3] = math.nan
    with pytest.raises(ValueError, match="residual stream must be finite"):
        positional_subspace(model, TOKENS, 0)
