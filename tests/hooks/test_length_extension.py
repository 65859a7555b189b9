"""The Λ-shaped window: brute force, what it leaves alone, and refusals."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from support.edited_scores import Call
from support.intervention_cases import L, close, edited, every_way, logits, mixed_of

from tl_posdisent import lambda_mask, read_attention

# sinks, window, ceiling: one below the other and the other way round, a ceiling that hides nothing, no sinks.
SHAPES = [(2, 4, 4), (2, 4, 3), (1, 4, 7), (2, 6, 2), (3, 2, 1), (0, 3, 3), (2, 12, 3), (2, 3, 12), (12, 1, 5)]


@every_way
def test_lambda_mask_is_brute_force(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    for n, shape in enumerate(SHAPES[:: 1 if name == "llama-gqa" else 3]):
        layer, (sinks, window, ceiling) = n % 2, shape
        call = Call("lambda_mask", sinks=sinks, window=window, distance_ceiling=ceiling)
        close(mixed_of(model, lambda_mask(model, *shape, layers=[layer]), layer), edited(model, [call], layer))


@every_way
def test_a_window_and_a_ceiling_as_long_as_the_text_change_nothing(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    plain = logits(model, [])
    close(logits(model, lambda_mask(model, 1, L, L)), plain)
    close(logits(model, lambda_mask(model, L, 1, L - 1)), plain)  # all keys are sinks
    for hooks in (lambda_mask(model, 1, L, 2), lambda_mask(model, 1, 3, L)):
        assert (logits(model, hooks) - plain).abs().max() > 0.01


@pytest.mark.usefixtures("unchecked")
def test_bidirectional_models_are_refused(shared_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model("bridge", "llama-gqa")
    spec = replace(read_attention(model, 0), causal=False)
    monkeypatch.setattr(sys.modules["tl_posdisent.hooks.lambda_mask"], "any_heads", lambda *_: [(spec, [0])])
    with pytest.raises(ValueError, match="lambda_mask needs causal attention, but layer 0 of LlamaForCausalLM is not"):
        lambda_mask(model, 1, 4, 4)
