"""Lies about distance: as brute force by complex numbers, whichever way they are told."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support import zoo
from support.intervention_cases import REAL, close, logits
from support.small_models import small_model
from support.tolerance import of_rounded_weights
from transformers import LlamaConfig, LlamaForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

from tl_posdisent import bridge_from_hf, dummy_distance, remap_distance
from tl_posdisent.hooks import applied
from tl_posdisent.hooks.rotated_scores import straight_pieces


@pytest.mark.parametrize("layers", [[0, 1, 2, 3], [3], [0, 2]])
def test_at_distance_0_layers_are_those_without_positions(layers: list[int]) -> None:
    """As in transformers' own model with such layers and the same weights."""
    size = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4}
    size |= {"num_hidden_layers": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(initializer_range=0.3, **size)).eval()
    rotated = [int(layer not in layers) for layer in range(4)]
    config = SmolLM3Config(no_rope_layers=rotated, rope_parameters=plain.config.rope_parameters, **size)
    config.tie_word_embeddings = plain.config.tie_word_embeddings
    without = SmolLM3ForCausalLM(config).eval()
    without.load_state_dict(plain.state_dict())
    tokens = torch.randint(1, 100, (2, 24))
    with torch.no_grad():
        expected, rotating = without(tokens).logits, plain(tokens).logits
    model = bridge_from_hf(plain)
    with torch.no_grad(), applied(model, dummy_distance(model, 0, layers=layers)):
        found = model(tokens)
    assert (expected - rotating).abs().max() > 0.1
    close(found, expected, layers=4)


def test_distances_into_the_future_are_said(shared_model: Any) -> None:
    """Of causal layers only."""
    model, both_ways = shared_model("bridge", "llama-gqa"), small_model(encoding="rope", causal=False)
    told = "must be 0 or more for keys before their query, got .* In {} causal layers? keys are then in the future"
    with pytest.warns(UserWarning, match="distance: " + told.format(1)):
        dummy_distance(model, -5, layers=0)
    with pytest.warns(UserWarning, match="distances: " + told.format(2)):
        remap_distance(model, lambda d: -d)
    real = (REAL[:, None] - REAL).double()
    with pytest.warns(UserWarning, match="distances: " + told.format(2)):
        remap_distance(model, -real)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remap_distance(model, real)  # negative only for keys after their query
        dummy_distance(model, 0)
        remap_distance(model, lambda d: d / 2)
        dummy_distance(both_ways, -5)
        remap_distance(both_ways, lambda d: -d)


@pytest.mark.parametrize("name", zoo.names("llama-gqa", "gemma2"))  # others cannot run beyond their context
def test_a_function_that_bends_beyond_the_context(name: str, shared_model: Any) -> None:
    """It is straight as far as the model's context goes (128 tokens), and the text is longer."""
    model, tokens, real = shared_model("bridge", name), zoo.random_tokens(140), torch.arange(140)
    exact = zoo.hf_model(name).double()
    with torch.no_grad():
        atol = of_rounded_weights(exact, lambda: exact(tokens, use_cache=False).logits)
    for function in (lambda d: d.clamp(max=130), lambda d: d + 5):
        cells = remap_distance(model, function((real[:, None] - real).clamp_min(0))[None, None])
        close(logits(model, remap_distance(model, function), tokens), logits(model, cells, tokens), atol)


@pytest.mark.parametrize(
    ("values", "pieces"),
    [
        ([3.0], [(0, 0.0, 3.0)]),
        ([0.0, 1.0, 2.0, 2.0, 2.0], [(0, 1.0, 0.0), (3, 0.0, 2.0)]),
        ([0.0, 0.0, 2.0, 2.0, 4.0, 4.0], [(0, 0.0, 0.0), (2, 0.0, 2.0), (4, 0.0, 4.0)]),
        ([0.0, 1.0, 5.0, 6.0, 0.0], [(0, 1.0, 0.0), (2, 1.0, 3.0), (4, 0.0, 0.0)]),
    ],
)
def test_straight_pieces_of_a_function(values: list[float], pieces: list[tuple[float, ...]]) -> None:
    assert straight_pieces(torch.tensor(values, dtype=torch.float64)) == pieces
    curved = torch.arange(40.0, dtype=torch.float64).square()
    assert straight_pieces(curved) is None
