"""Other positions for RoPE: as Hugging Face with other position_ids, far, fractional and negative."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from support.edited_scores import Call
from support.intervention_cases import (
    BROKEN,
    FAR,
    REAL,
    TOKENS,
    UNORDERED,
    L,
    by_brute_force,
    close,
    distances,
    edited,
    every_way,
    logits,
    mixed_of,
)
from support.zoo_configs import MECHANISMS

from tl_posdisent import remap_distance, swap_positions

pytestmark = pytest.mark.tl4

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


@every_way
def test_positions_between_and_before_the_whole_numbers(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    got = mixed_of(model, swap_positions(model, BROKEN))
    close(got, edited(model, [Call("swap_positions", positions=BROKEN)]), layers=1)
    close(got, by_brute_force(model, distances(BROKEN)), layers=1)
    per_text = torch.stack([BROKEN, BROKEN.flip(0)])
    expected = edited(model, [Call("swap_positions", positions=per_text)])
    close(mixed_of(model, swap_positions(model, per_text)), expected, layers=1)
    close(logits(model, swap_positions(model, [0.5 + i for i in range(L)])), logits(model, []))
