"""The Λ-shaped window: brute force, what it leaves alone, and refusals."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import zoo
from support.edited_scores import Call
from support.intervention_cases import REAL, TOKENS, L, close, edited, every_way, logits, mixed_of
from torch import Tensor

from tl_posdisent import lambda_mask, position_interpolation, read_attention
from tl_posdisent.hooks import applied

pytestmark = pytest.mark.tl4

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


# --- the beginning of a text is where it begins, whatever its positions are ---------------------------------------


def run(model: Any, hooks: list[Any], tokens: Tensor = TOKENS, **more: Any) -> Tensor:
    with torch.no_grad(), applied(model, hooks):
        return model(tokens, **more)


@pytest.mark.parametrize("name", zoo.names("llama-gqa", "gemma2"))
def test_sinks_are_the_first_tokens_at_any_positions(name: str, shared_model: Any) -> None:
    """From another position on, nothing changes; three steps apart, it is as with distances of thirds."""
    model, ones = shared_model("bridge", name), torch.ones_like(TOKENS)
    for heads in (None, [1, 6]):
        hooks = lambda_mask(model, 2, 3, 6, heads=heads)
        for start in (1, 100):
            got = run(model, hooks, attention_mask=ones, position_ids=(REAL + start).expand(2, -1))
            close(got, run(model, hooks), 3e-4)
        apart = run(model, hooks, attention_mask=ones, position_ids=(3 * REAL + 7).expand(2, -1))
        thirds = lambda_mask(model, 2, 3, 2, heads=heads) + position_interpolation(model, 1 / 3, heads=heads)
        if heads is None:
            close(apart, run(model, thirds), 3e-4)
        else:  # other heads have the positions as well
            others = position_interpolation(model, 1 / 3, heads=[h for h in range(8) if h not in heads])
            close(apart, run(model, thirds + others), 3e-4)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2"))
def test_sinks_of_a_text_behind_padding(kind: str, name: str, shared_model: Any) -> None:
    """Each text as it is alone."""
    model, pad = shared_model(kind, name), 3
    tokens, mask = TOKENS.clone(), torch.ones_like(TOKENS)
    tokens[0, :pad], mask[0, :pad] = 0, 0
    for heads in (None, [1, 6]):
        hooks = lambda_mask(model, 2, 3, 5, heads=heads)
        alone = run(model, hooks, TOKENS[:1, pad:])[0]
        got = run(model, hooks, tokens, attention_mask=mask)
        close(got[0, pad:], alone, 3e-4)
        close(got[1:], run(model, hooks, TOKENS[1:]), 3e-4)


def test_packed_texts_have_sinks_of_their_own(shared_model: Any) -> None:
    model, half = shared_model("bridge", "llama-gqa"), L // 2
    seen = (REAL[:, None] // half == REAL // half) & (REAL[:, None] >= REAL)
    mask = torch.zeros(2, 1, L, L).masked_fill(~seen, torch.finfo(torch.float32).min)
    for heads in (None, [1, 6]):
        hooks = lambda_mask(model, 1, 2, 3, heads=heads)
        got = run(model, hooks, attention_mask=mask, position_ids=(REAL % half).expand(2, -1))
        close(got[:, :half], run(model, hooks, TOKENS[:, :half]), 3e-4)
        close(got[:, half:], run(model, hooks, TOKENS[:, half:]), 3e-4)
        with pytest.raises(ValueError, match=f"hides the first {half} keys of row 0 from all later tokens"):
            run(model, hooks, attention_mask=mask)


# --- interpolation ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_bidirectional_models_are_refused(shared_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model("bridge", "llama-gqa")
    spec = replace(read_attention(model, 0), causal=False)
    monkeypatch.setattr(sys.modules["tl_posdisent.hooks.lambda_mask"], "any_heads", lambda *_: [(spec, [0])])
    with pytest.raises(ValueError, match="lambda_mask needs causal attention, but layer 0 of LlamaForCausalLM is not"):
        lambda_mask(model, 1, 4, 4)
