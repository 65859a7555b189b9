"""The Toeplitz share of scores is the one that is computed from the cells, one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tl_posdisent.rope import toeplitz_share

TEXT, HEAD, LENGTH = 3, 2, 9


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SCORES = normal(TEXT, HEAD, LENGTH, LENGTH) + 5 + normal(TEXT, 1, 1, 1, seed=1)
SOME = normal(TEXT, 1, LENGTH, LENGTH, seed=2) > -0.3
MASKS: list[dict[str, Any]] = [
    {},
    {"mask": "full"},
    {"window": 4},
    {"mask": "full", "window": 3},
    {"mask": SOME[0, 0]},
    {"mask": SOME},
]


def inside(mask: Any = "causal", window: int | None = None) -> Tensor:
    d = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    cells = mask if isinstance(mask, Tensor) else (d >= 0 if mask == "causal" else d > -LENGTH)
    return (cells & (d.abs() < (window or LENGTH))).expand(TEXT, HEAD, -1, -1)


def by_hand(scores: Tensor, cells: Tensor) -> float:
    """Of one matrix, or of a stack of matrices as one."""
    values: dict[int, list[float]] = {}
    for *_, i, j in (at := cells.nonzero()).tolist():
        values.setdefault(i - j, [])
    for where in at.tolist():
        values[where[-2] - where[-1]].append(scores[tuple(where)].item())
    everything = [x for group in values.values() for x in group]
    mean = math.fsum(everything) / len(everything)
    between = math.fsum(len(group) * (math.fsum(group) / len(group) - mean) ** 2 for group in values.values())
    return between / math.fsum((x - mean) ** 2 for x in everything)


@pytest.mark.parametrize("how", MASKS)
def test_share_by_hand(how: dict[str, Any]) -> None:
    got, pooled, cells = toeplitz_share(SCORES, **how), toeplitz_share(SCORES, **how, pool=True), inside(**how)
    for head in range(HEAD):
        for text in range(TEXT):
            assert got[text, head].item() == pytest.approx(by_hand(SCORES[text, head], cells[text, head]), abs=1e-12)
        assert pooled[head].item() == pytest.approx(by_hand(SCORES[:, head], cells[:, head]), abs=1e-12)


def test_texts_of_different_levels_are_pooled_as_one() -> None:
    """Longer ones: of short ones the sums are taken about their very mean."""
    scores = normal(3, 1, 30, 30) + 10 * normal(3, 1, 1, 1, seed=1)
    inside = torch.ones(3, 30, 30).tril().bool()
    assert toeplitz_share(scores, pool=True).item() == pytest.approx(by_hand(scores[:, 0], inside), abs=1e-12)


def test_low_precision_is_summed_in_double() -> None:
    low = SCORES.bfloat16()
    assert torch.equal(toeplitz_share(low), toeplitz_share(low.double()))


def test_scores_that_vary_by_rounding_alone_have_no_share() -> None:
    for value in (0.1, -3.7, 12345.678):
        constant = torch.full((2, 9, 9), value, dtype=torch.float64)
        nearly = constant * (1 + 2**-52 * torch.randint(0, 3, constant.shape))
        for scores in (constant, nearly):
            assert bool(toeplitz_share(scores).isnan().all())
            assert bool(toeplitz_share(scores, pool=True).isnan().all())
