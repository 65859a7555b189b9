"""Distance matrices of a whole text, which is run in parts against a KV cache: the logits of one whole pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hooks.test_generation import TEXTS, step_by_step
from support import zoo
from support.intervention_cases import L, close
from torch import Tensor

from tl_posdisent import remap_distance

pytestmark = pytest.mark.usefixtures("unchecked")
SHAPES = [(L, L), (8, L, L), (2, 1, L, L), (2, 8, L, L)]
ENDS = [(7, 12), (4, 9, 12), (11, 12)]  # of two or three parts, the last one also a single token


def matrix(shape: tuple[int, ...]) -> Tensor:
    """Random distances: no row or column can stand for another."""
    return 20 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def check_parts(model: Any, kind: str, hooks: list[Any]) -> None:
    """Each part sees the rows of its queries, and the columns of all keys until then."""
    with torch.no_grad():
        whole, plain = model.run_with_hooks(TEXTS, fwd_hooks=hooks), model(TEXTS)
    assert (whole - plain).abs().max() > 0.01
    for ends in ENDS:
        close(step_by_step(model, kind, hooks, TEXTS, ends=ends), whole, 2e-4)


# Grouped queries in two architectures, norms between and not; GPT-J's bridge does not show its scores.
@pytest.mark.parametrize("heads", [None, [1, 6]], ids=["all heads", "some heads"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "qwen3", "gptj"))
def test_parts_of_a_text_have_their_rows_of_the_matrix(
    kind: str, name: str, shape: tuple[int, ...], heads: Any, shared_model: Any
) -> None:
    model = shared_model(kind, name)
    check_parts(model, kind, remap_distance(model, matrix(shape), heads=heads))


@pytest.mark.parametrize("heads", [None, [1, 6]], ids=["all heads", "some heads"])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "qwen3", "gptj"))
def test_parts_of_a_text_have_the_distances_of_a_function(kind: str, name: str, heads: Any, shared_model: Any) -> None:
    model = shared_model(kind, name)
    check_parts(model, kind, remap_distance(model, lambda d: 9 - d.square() / 7, heads=heads))
