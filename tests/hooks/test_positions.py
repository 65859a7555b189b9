"""Other positions for RoPE: as Hugging Face with other position_ids, far, fractional and negative."""

from __future__ import annotations

from typing import Any

import pytest
from support import zoo
from support.intervention_cases import (
    FAR,
    REAL,
    TOKENS,
    UNORDERED,
    close,
    distances,
    every_way,
    logits,
)
from support.zoo_configs import MECHANISMS

from tl_posdisent import remap_distance, swap_positions

ROTARY = [name for name in MECHANISMS if zoo.ARCHITECTURES[name].rotary and not zoo.ARCHITECTURES[name].hybrid]


@pytest.mark.parametrize(("kind", "name"), zoo.cases(*ROTARY))
def test_positions_are_the_position_ids_of_hugging_face(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    plain, expected = logits(model, []), zoo.hf_logits(name, TOKENS, position_ids=UNORDERED)
    scale = plain.abs().max().item()
    assert (expected - plain).abs().max() > 0.1 * scale
    close(logits(model, swap_positions(model, REAL)), plain)
    close(logits(model, swap_positions(model, REAL + 37)), plain)
    close(logits(model, swap_positions(model, UNORDERED)), expected)
    close(logits(model, remap_distance(model, distances(UNORDERED)[:, None])), expected)


@every_way
def test_far_positions(kind: str, name: str, shared_model: Any) -> None:
    """A float32 angle at position 50 000 is off by 0.002, and Hugging Face's is off in the same way.

    Where a HookedTransformer computes its own tables the frequencies differ in the last bit from Hugging Face's."""
    model = shared_model(kind, name)
    reach = FAR % 128 if name == "gptj" else FAR  # which keeps a table for its context
    expected = zoo.hf_logits(name, TOKENS, position_ids=reach)
    assert (expected - logits(model, [])).abs().max() > 0.5
    got = logits(model, swap_positions(model, reach))
    close(got, expected, 1e-4 if kind == "bridge" else 3e-2)
    plain = logits(model, [])
    close(logits(model, swap_positions(model, REAL + 100_000)), plain, 0.2)
