"""Laws of hooks on models, for any positions, layers, heads and texts that hypothesis comes upon.

Each law compares two runs that must agree, whatever is drawn; and whatever happens, the model is as it was.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import zoo
from support.fuzzing import examples, generator
from support.untouched import state
from torch import Tensor

from tl_posdisent import (
    capture,
    lambda_mask,
    position_interpolation,
    remap_distance,
    swap_positions,
)
from tl_posdisent.experiments import perturb
from tl_posdisent.hooks import applied, patch_scores, patch_vectors, phase_noise

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.slow,
    pytest.mark.extended,
]  # checks take longer than these models

# Rotation tables, rotated vectors, unrotated ones; half and adjacent pairs; partial; norms, soft caps, windows.
MODELS = ["llama-gqa", "gptj", "neox", "gemma2", "qwen3"]


@functools.cache
def model(name: str) -> Any:
    return zoo.bridge(name)


@st.composite
def runs(draw: Any, shortest: int = 2) -> tuple[Any, Tensor]:
    """A model and a text for it."""
    batch, length, seed = draw(st.integers(1, 3)), draw(st.integers(shortest, 14)), draw(st.integers(0, 2**31))
    return model(draw(st.sampled_from(MODELS))), torch.randint(3, 61, (batch, length), generator=generator(seed))


@st.composite
def places(draw: Any) -> dict[str, Any]:
    """Some layers and heads, or all."""
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["layers"] = draw(st.lists(st.integers(0, 1), min_size=1, max_size=2, unique=True))
    if draw(st.booleans()):
        options["heads"] = draw(st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True))
    return options


def logits(model: Any, tokens: Tensor, hooks: list[Any]) -> Tensor:
    before = state(model)
    with torch.no_grad(), applied(model, hooks):
        out = model(tokens)
    assert state(model) == before
    return out


def assert_same(model: Any, tokens: Tensor, one: list[Any], other: list[Any], atol: float = 2e-3) -> None:
    """Logits are of size 10."""
    torch.testing.assert_close(logits(model, tokens, one), logits(model, tokens, other), rtol=0, atol=atol)


def positions_of(tokens: Tensor, seed: int) -> Tensor:
    """For each text: negative, broken, repeated, up to some hundred."""
    return (60 * torch.randn(tokens.shape, generator=generator(seed))).round() / 4


@examples(40)
@given(runs(), st.integers(0, 2**31), st.floats(-200, 200), places())
def test_only_differences_of_positions_matter(run: Any, seed: int, shift: float, where: dict[str, Any]) -> None:
    """If whole key heads are told the same."""
    model, tokens = run
    where.pop("heads", None)
    at = positions_of(tokens, seed)
    assert_same(model, tokens, swap_positions(model, at, **where), swap_positions(model, at + shift, **where))


@examples(40)
@given(runs(shortest=3), places(), st.integers(0, 6))
def test_what_changes_nothing_changes_nothing(run: Any, where: dict[str, Any], which: int) -> None:
    model, tokens = run
    length = tokens.shape[1]
    hooks = [
        lambda: swap_positions(model, torch.arange(length), **where),
        lambda: remap_distance(model, lambda d: d, **where),
        lambda: position_interpolation(model, 1, **where),
        lambda: phase_noise(model, 0.0, **where),
        lambda: lambda_mask(model, 0, length, length, **where),
        lambda: perturb(model, tokens, "index", 0).hooks,
        lambda: swap_positions(model, torch.arange(length) - 5.0, **where),
    ][which]()
    assert_same(model, tokens, hooks, [])


@examples(30)
@given(runs(), st.integers(0, 1), st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True), st.booleans())
def test_its_own_put_in_again_changes_nothing(run: Any, layer: int, heads: list[int], vectors: bool) -> None:
    model, tokens = run
    (seen,) = capture(model, tokens, layers=[layer])
    if vectors:
        hooks = patch_vectors(model, layer, seen.q_rot, seen.k_rot, heads=heads)
    else:
        hooks = patch_scores(model, layer, seen.scores, heads=heads)
    assert_same(model, tokens, hooks, [])


@examples(30)
@given(runs(shortest=3), st.floats(0, 1), st.integers(0, 2**31), st.integers(1, 4))
def test_words_in_another_order_are_the_same_words(run: Any, fraction: float, seed: int, window: int) -> None:
    model, tokens = run
    one, again = (perturb(model, tokens, "order", fraction, seed=seed, window=window) for _ in range(2))
    assert torch.equal(one.tokens, again.tokens)
    assert torch.equal(one.tokens.sort(-1).values, tokens.sort(-1).values)
    assert bool((one.moved | (one.tokens == tokens)).all())
