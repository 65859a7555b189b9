"""Models whose rotation changes with the length of the text: interventions take that of the running text, or refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import zoo
from support.intervention_cases import close

from tl_posdisent import (
    dummy_distance,
    lambda_mask,
    limit_frequencies,
    position_interpolation,
    read_model,
    remap_distance,
    swap_positions,
)
from tl_posdisent.hooks import applied, phase_noise
from tl_posdisent.models.reading.forward import Hook

pytestmark = pytest.mark.usefixtures("unchecked")
ORIGINAL, LENGTH = 16, 28  # tokens of the original context, and of the texts here


def _model(which: str) -> Any:
    name, kind = which.split()
    scaled: dict[str, Any] = {"rope_type": kind, "rope_theta": 500.0, "factor": 4.0}
    if kind == "longrope":
        n = zoo.ARCHITECTURES[name].arguments["hidden_size"] // zoo.ARCHITECTURES[name].arguments["num_attention_heads"]
        size = n // 2
        scaled |= {
            "short_factor": [1.0] * size,
            "long_factor": [1.0 + i for i in range(size)],
            "original_max_position_embeddings": ORIGINAL,
        }
    context = {"max_position_embeddings": ORIGINAL if kind == "dynamic" else 128}
    if name == "phi3":
        context["original_max_position_embeddings"] = ORIGINAL
    return zoo.bridge(name, rope_parameters=scaled, **context)


MODELS = [
    "phi3 longrope",
    "llama-gqa dynamic",
    *(pytest.param(which, marks=pytest.mark.slow) for which in ("llama-gqa longrope", "neox dynamic")),
]
REAL = torch.arange(LENGTH)
SAME: dict[str, Callable[..., list[Hook]]] = {
    "swap": lambda m, **w: swap_positions(m, REAL, **w),
    "swap by function": lambda m, **w: swap_positions(m, lambda p: p, **w),
    "shifted": lambda m, **w: swap_positions(m, REAL + 5, **w),
    "interpolate": lambda m, **w: position_interpolation(m, 1.0, **w),
    "remap": lambda m, **w: remap_distance(m, lambda d: d, **w),
    "remap cells": lambda m, **w: remap_distance(m, (REAL[:, None] - REAL).double()[None, None], **w),
    "lambda": lambda m, **w: lambda_mask(m, 1, LENGTH, LENGTH, **w),
    "no noise": lambda m, **w: phase_noise(m, 0.0, **w),
}


@pytest.mark.parametrize("which", MODELS)
def test_what_changes_nothing_changes_nothing(which: str) -> None:
    model, tokens = _model(which), zoo.random_tokens(LENGTH)
    reading = read_model(model)
    with torch.no_grad():
        plain = model(tokens)
        assert (plain[:, :10] - model(tokens[:, :10])).abs().max() > 0.01  # a causal model, but for its rotation
        for tool, make in SAME.items():
            for where in ({}, {"heads": [1, 6]}):
                try:
                    with applied(model, make(reading, **where)):
                        got = model(tokens)
                except ValueError as error:
                    raise AssertionError(f"{tool} {where}: {error}") from error
                assert float((got - plain).abs().max()) < 3e-4, (tool, where)


@pytest.mark.parametrize("which", MODELS)
def test_two_ways_of_saying_one_thing(which: str) -> None:
    """Tables, turned vectors and recomputed scores agree on a rotation that was not the one read from the model."""
    model, tokens = _model(which), zoo.random_tokens(LENGTH)
    reading = read_model(model)

    def logits(hooks: list[Hook]) -> torch.Tensor:
        with torch.no_grad(), applied(model, hooks):
            return model(tokens)

    places = torch.arange(LENGTH).flip(0) * 2
    cells = (places[:, None] - places).double()[None, None]
    for heads in (None, [1, 6], list(range(4))):
        expected = logits(remap_distance(reading, cells, heads=heads))
        assert (expected - logits([])).abs().max() > 0.1
        close(logits(swap_positions(reading, places, heads=heads)), expected, 3e-4)
    matrix = torch.full((1, 1, LENGTH, LENGTH), 5.0)
    close(logits(dummy_distance(reading, 5)), logits(remap_distance(reading, matrix)), 3e-4)
    close(logits(limit_frequencies(reading, high=0, mode="freeze")), logits(dummy_distance(reading, 0)), 3e-4)


@pytest.mark.parametrize("which", MODELS)
def test_padded(which: str) -> None:
    """A long text beside one within the original context: the model gives both the long text's rotation."""
    model, tokens = _model(which), zoo.random_tokens(LENGTH)
    mask = torch.ones_like(tokens)
    mask[0, : LENGTH - 10] = 0
    with torch.no_grad():
        plain = model(tokens, attention_mask=mask)
        for tool in ("swap by function", "interpolate", "remap", "lambda"):
            with applied(model, SAME[tool](model)):
                got = model(tokens, attention_mask=mask)
            close(got[0, LENGTH - 10 :], plain[0, LENGTH - 10 :], 3e-4)
            close(got[1], plain[1], 3e-4)
