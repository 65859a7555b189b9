"""Edits that leave everything as it is, and positions that are shifted together, change nothing, whatever is masked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import zoo
from support.attention_law import LENGTH, TOKENS
from support.lanes import slow
from support.tolerance import rounding
from torch import Tensor

from tl_posdisent import (
    capture,
    knock_out,
    lambda_mask,
    limit_frequencies,
    position_interpolation,
    read_model,
    remap_distance,
    swap_positions,
)
from tl_posdisent.hooks import applied, patch_vectors, phase_noise, substitute_additive, substitute_attention
from tl_posdisent.models import ModelReading

pytestmark = pytest.mark.usefixtures("unchecked")

MODELS = [
    *(("bridge", "llama-gqa"), ("hooked", "gemma2"), ("bridge", "gptj")),
    *slow([("hooked", "llama-gqa"), ("hooked", "gptj"), ("bridge", "gemma2"), ("bridge", "gpt_oss")]),
    *slow([("bridge", "olmo2"), ("bridge", "deepseek_v3"), ("bridge", "gemma4"), ("bridge", "smollm3")]),
    *slow([("bridge", "llama-yarn"), ("bridge", "nanochat"), ("bridge", "qwen3.5")]),
]
SLOT = torch.arange(LENGTH)
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def rotating(reading: ModelReading) -> int:
    return next(spec.layer for spec in reading.specs() if spec.rotary is not None)


def one_angle(reading: ModelReading) -> Any:
    """Noise that turns queries and keys of all tokens alike."""
    spec = reading.specs(rotating(reading))[0]
    angles = torch.randn(len(spec.require_rotary("noise").frequencies), dtype=torch.float64)
    return phase_noise(reading, angles.expand(LENGTH, -1), layers=[spec.layer])


def own_vectors(reading: ModelReading) -> Any:
    own = capture(reading, TOKENS, layers=[rotating(reading)])[0]
    return patch_vectors(reading, own.layer, own.q_rot, own.k_rot)


ON_ROTATION: dict[str, Callable[[ModelReading], Any]] = {
    "positions": lambda m: swap_positions(m, SLOT),
    "positions by a function": lambda m: swap_positions(m, lambda p: p),
    "positions of some heads": lambda m: swap_positions(m, lambda p: p, heads=[1, 6]),
    "a common shift": lambda m: swap_positions(m, lambda p: p + 3.5),
    "a common shift of some heads": lambda m: swap_positions(m, SLOT - 70, heads=[2]),
    "distances": lambda m: remap_distance(m, lambda d: d),
    "distances in a table": lambda m: remap_distance(m, (SLOT[:, None] - SLOT).double()),
    "a ceiling as long as the text": lambda m: remap_distance(m, lambda d: d.clamp(max=LENGTH)),
    "interpolation": lambda m: position_interpolation(m, 1),
    "no noise": lambda m: phase_noise(m, 0.0),
    "one angle for all": one_angle,
    "all frequencies": lambda m: limit_frequencies(m, high=1e9),
    "own vectors": own_vectors,
    "a window as long as the text": lambda m: lambda_mask(m, 2, LENGTH, LENGTH),
}
ON_SCORES: dict[str, Callable[[ModelReading], Any]] = {
    "no cells": lambda m: knock_out(m, cells=torch.zeros(LENGTH, LENGTH, dtype=torch.bool)),
    "all components": lambda m: substitute_additive(m, ("distance", "query", "key", "residual")),
    "untouched": lambda m: substitute_attention(m, "untouched"),
}


def check(reading: ModelReading, tools: dict[str, Callable[[ModelReading], Any]], **options: Any) -> None:
    def run(hooks: Any) -> Tensor:
        with torch.no_grad(), applied(reading.model, hooks):
            return reading.model(TOKENS, **options)

    plain = run([])
    for tool, make in tools.items():
        error = (run(make(reading)) - plain).abs().max()
        assert error <= rounding(plain, 16), tool  # two layers round in eight places each


@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_edits_that_change_nothing(kind: str, name: str, shared_model: Any) -> None:
    check(read_model(shared_model(kind, name)), ON_ROTATION | ON_SCORES)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("gpt2", "bloom", "gpt_neo", "jamba"))
def test_without_rotation(kind: str, name: str, shared_model: Any) -> None:
    check(read_model(shared_model(kind, name)), ON_SCORES)


MASKS = {
    "a token not to itself": CAUSAL & ~((SLOT[:, None] == 5) & (SLOT == 5)),
    "a key hidden": CAUSAL & (SLOT != 4),
    "cells at random": CAUSAL
    & ((torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5) | (SLOT == 0)),
    "two-way prefix": CAUSAL | ((SLOT < 5) & (SLOT[:, None] < 5)),
    "text by text": torch.stack([CAUSAL & ~((SLOT[:, None] == 4) & (SLOT == 4)), CAUSAL & (SLOT != 2)]),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["llama-gqa", *slow(["gemma2", "gpt_oss", "olmo2", "deepseek_v3"])])
def test_whatever_is_masked(name: str, mask: str, shared_model: Any) -> None:
    seen = MASKS[mask].expand(len(TOKENS), -1, -1)[:, None]
    given = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    tools = ON_ROTATION | {"no cells": ON_SCORES["no cells"]}
    if mask == "two-way prefix":  # functions of distances backwards
        tools = {
            tool: make for tool, make in tools.items() if tool not in ("distances", "a ceiling as long as the text")
        }
    del tools["own vectors"]  # of another mask
    check(read_model(shared_model("bridge", name)), tools, attention_mask=given)


@pytest.mark.parametrize("value", [-torch.inf, -1e9, -1e4, -1e3])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2"))
def test_masks_of_any_value(kind: str, name: str, value: float, shared_model: Any) -> None:
    """Of a hook of the user's own: in one cell of one head, or in half of the cells."""
    reading = read_model(shared_model(kind, name))
    cell = torch.zeros(len(TOKENS), 8, LENGTH, LENGTH, dtype=torch.bool)
    cell[1, 6, 7, 3] = True
    for hidden in (cell, CAUSAL & ~MASKS["cells at random"]):
        own = [
            (spec.taps.scores, lambda scores, hook, hidden=hidden: scores + torch.where(hidden, value, 0.0))
            for spec in reading.specs()
        ]
        with applied(reading.model, own):
            check(reading, {tool: ON_ROTATION[tool] for tool in ("distances", "interpolation", "all frequencies")})
