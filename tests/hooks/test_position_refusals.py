"""What hooks for positions refuse when the model runs: texts that do not fit, caches, padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from support.intervention_cases import (
    BROKEN,
    TOKENS,
    UNORDERED,
    L,
    close,
    distances,
    every_way,
    logits,
)
from torch import Tensor

from tl_posdisent import remap_distance, swap_positions
from tl_posdisent.models.running.forward_pass import Hook
from tl_posdisent.utils.errors import ArgumentError


def refused(model: Any, hooks: list[Hook], message: str, **arguments: Any) -> None:
    """The run fails with this message, and the model is as before."""
    plain = logits(model, [])
    tokens = arguments.pop("tokens", TOKENS)
    with torch.no_grad(), pytest.raises(ValueError, match=message), model.hooks(fwd_hooks=hooks):
        model(tokens, **arguments)
    assert torch.equal(logits(model, []), plain)


def test_a_result_that_is_not_of_pattern_and_values_is_refused(shared_model: Any) -> None:
    """Where edited scores are discarded, it has to be put together anew."""
    model = shared_model("bridge", "gptj")

    def doubled(z: Tensor, hook: Any) -> Tensor:
        return 2 * z

    hooks = [("blocks.0.attn.hook_z", doubled), *remap_distance(model, lambda d: d.clamp(max=3), layers=[0])]
    refused(model, hooks, "its hook_z is not the sum of its values, weighted by its pattern")


@every_way
def test_a_text_of_another_length_is_refused(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    ten = zoo.random_tokens(10)
    for heads in (None, [1], list(range(4))):
        hooks = swap_positions(model, UNORDERED, heads=heads)
        refused(model, hooks, "positions were given for 12 tokens, and the model runs on 10", tokens=ten)
    matrix = remap_distance(model, distances(BROKEN))
    refused(model, matrix, r"distances must have shape \(query, key\) = \(10, 10\).* got \(12, 12\)", tokens=ten)


@every_way
def test_another_number_of_texts_is_refused(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    for heads in (None, [1]):
        hooks, one = swap_positions(model, UNORDERED, heads=heads), zoo.random_tokens(batch=1)
        refused(model, hooks, "positions were given for 2 texts, and the model runs on 1", tokens=one)
    matrix = torch.randn(2, 1, L, L)
    refused(
        model, remap_distance(model, matrix), r"distances must have shape .* 3 texts", tokens=zoo.random_tokens(batch=3)
    )
    refused(
        model, remap_distance(model, torch.randn(3, L, L)), r"distances must have shape .* 8 heads .*got \(3, 12, 12\)"
    )
    hole = torch.zeros(8, L, L)
    hole[3, 5, 5] = torch.inf
    refused(model, remap_distance(model, hole), "distances must be finite inside the mask")


@pytest.mark.usefixtures("unchecked")
def test_pairs_of_tokens_are_no_positions(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    for pairs in ([(5, 6)], ((5, 6), (7, 8)), [(torch.tensor(5), 6)]):
        with pytest.raises(
            ArgumentError, match=r"positions must be one position for each token.* got pairs.* exchange"
        ):
            swap_positions(model, pairs)  # type: ignore[arg-type]
    exchanged = torch.arange(L)
    exchanged[[5, 6]] = exchanged[[6, 5]]
    for same in (exchanged, exchanged.tolist(), tuple(exchanged.tolist()), [exchanged.tolist()] * 2):
        close(logits(model, swap_positions(model, same)), logits(model, swap_positions(model, exchanged)))
