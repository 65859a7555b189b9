"""Other positions for RoPE: as Hugging Face with other position_ids, far, fractional and negative."""

from __future__ import annotations

from dataclasses import replace
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

from tl_posdisent import read_model, remap_distance, swap_positions
from tl_posdisent.hooks.edits.running_positions import positions_from_vectors, rounding
from tl_posdisent.rope.rotary import rotate

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


@pytest.mark.parametrize("name", zoo.names("llama-gqa", "gptj"))
@pytest.mark.parametrize("start", [0, 6000, 16_000])
def test_far_positions_of_the_running_text_are_seen(name: str, start: int) -> None:
    """The tables of a HookedTransformer are the less exact the further, yet every position differs from the next."""
    model = zoo.hooked(name, max_position_embeddings=16_384)
    rotary = read_model(model).specs()[0].require_rotary("")
    q = torch.randn(1, 8, 4, model.cfg.d_head, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(start, start + 8)
    turned = model.blocks[0].attn.apply_rotary(q, start)
    exact, size = rotate(q.double(), positions, rotary), q.norm(dim=-1).amax() ** 2  # scores of q with itself
    error = torch.einsum("bqhd,bkhd->bhqk", turned.double(), turned.double())
    error = error - torch.einsum("bqhd,bkhd->bhqk", exact, exact)
    assert error.abs().amax() <= rounding(rotary, positions) * size
    for expected in (positions, positions + 1, positions // 2 + 4):
        found = positions_from_vectors(q, turned, rotary, expected)
        assert found is not None
        assert torch.equal(found.view(-1), positions)
    if len(rotary.frequencies) < 4:
        return  # two frequencies come near any rotation at one of many positions
    other = replace(rotary, frequencies=rotary.frequencies * (1 + 0.5 / (start + 8)))
    assert positions_from_vectors(q, turned, other, positions) is None


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
