"""The Λ-shaped window: brute force, what it leaves alone, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.intervention_cases import REAL, L, close, edited, every_way, logits, mixed_of
from torch import Tensor

from tl_posdisent import lambda_mask, read_attention
from tl_posdisent.hooks import positions as windows
from tl_posdisent.hooks.edits.rotation_and_score_edits import DistanceMap, Order, ScoreEdit

DISTANCE = REAL[:, None] - REAL
# sinks, window, ceiling: one below the other and the other way round, a ceiling that hides nothing, no sinks.
SHAPES = [(2, 4, 4), (2, 4, 3), (1, 4, 7), (2, 6, 2), (3, 2, 1), (0, 3, 3), (2, 12, 3), (2, 3, 12), (12, 1, 5)]


def by_brute_force(model: Any, sinks: int, window: int, ceiling: int, layer: int) -> Tensor:
    """What every head takes along: scores at the ceiling by the oracle, hidden cell by cell."""
    cells = [[j < sinks or i - j < window for j in range(L)] for i in range(L)]
    hide = ScoreEdit("", lambda view: view.scores.masked_fill(~torch.tensor(cells), -torch.inf), Order.HIDE)
    return edited(model, [DistanceMap("", DISTANCE.clamp(max=ceiling)), hide], layer)


@every_way
def test_lambda_mask_is_brute_force(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    for n, shape in enumerate(SHAPES[:: 1 if name == "llama-gqa" else 3]):
        layer = n % 2
        close(mixed_of(model, lambda_mask(model, *shape, layers=[layer]), layer), by_brute_force(model, *shape, layer))


@every_way
def test_a_window_and_a_ceiling_as_long_as_the_text_change_nothing(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    plain = logits(model, [])
    close(logits(model, lambda_mask(model, 1, L, L)), plain)
    close(logits(model, lambda_mask(model, L, 1, L - 1)), plain)  # all keys are sinks
    for hooks in (lambda_mask(model, 1, L, 2), lambda_mask(model, 1, 3, L)):
        assert (logits(model, hooks) - plain).abs().max() > 0.01


# --- interpolation ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_bidirectional_models_are_refused(shared_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model("bridge", "llama-gqa")
    spec = replace(read_attention(model, 0), causal=False)
    monkeypatch.setattr(windows, "any_heads", lambda *_: [(spec, [0])])
    with pytest.raises(ValueError, match="lambda_mask needs causal attention, but layer 0 of LlamaForCausalLM is not"):
        lambda_mask(model, 1, 4, 4)
