"""How Toeplitz scores are, spectra of products, angles between subspaces: brute force, and other libraries."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tl_posdisent.rope import (
    principal_angles,
    toeplitz_share,
)
from tl_posdisent.rope.toeplitz_and_angles import condition_number, effective_rank, product_spectrum

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


# --- spectra ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_query", "n_key", "d"), [(7, 9, 4), (3, 9, 5), (9, 2, 6)])
def test_spectrum_of_a_product(n_query: int, n_key: int, d: int) -> None:
    q, k = normal(2, n_query, d), normal(2, n_key, d, seed=1)
    got, dense = product_spectrum(q, k), torch.linalg.svdvals(q @ k.mT)
    rank = min(n_query, n_key, d)
    torch.testing.assert_close(got[..., :rank], dense[..., :rank], rtol=1e-12, atol=1e-12)
    assert got.shape[-1] == rank


def test_condition_and_rank_of_known_spectra() -> None:
    spectra = torch.tensor([[2.0, 2, 2], [8, 4, 2], [1, 0, 0]], dtype=torch.float64)
    assert condition_number(spectra).tolist() == [1, 4, math.inf]
    entropy = -sum(p * math.log(p) for p in (8 / 14, 4 / 14, 2 / 14))
    assert effective_rank(spectra).tolist() == pytest.approx([3, math.exp(entropy), 1], abs=1e-12)


# --- angles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 5), (5, 2), (4, 4), (7, 6)])
def test_angles_are_those_of_scipy(m: int, n: int) -> None:
    linalg = pytest.importorskip("scipy.linalg")
    a, b = normal(8, m), normal(8, n, seed=1)
    for x, y in ((a, b), (a, a[:, :1] + 1e-9 * b[:, :1]), (b, b @ normal(n, n, seed=2))):
        expected = torch.tensor(linalg.subspace_angles(x.numpy(), y.numpy()))
        torch.testing.assert_close(principal_angles(x, y), expected, rtol=1e-6, atol=1e-13)


@pytest.mark.parametrize("angle", [0.0, 1e-10, 1e-3, 0.7, math.pi / 4, 0.8, math.pi / 2 - 1e-10, math.pi / 2])
def test_angles_keep_their_digits(angle: float) -> None:
    turned = torch.tensor([[1.0, 0], [0, math.cos(angle)], [0, math.sin(angle)]], dtype=torch.float64)
    plane, rotation = torch.eye(3, dtype=torch.float64)[:, :2], torch.linalg.qr(normal(3, 3)).Q
    for a, b in ((plane, turned), (turned, plane)):
        angles = principal_angles(rotation @ a @ normal(2, 2, seed=3), rotation @ b)
        torch.testing.assert_close(angles, torch.tensor([angle, 0], dtype=torch.float64), rtol=1e-12, atol=1e-15)


def test_dependent_columns_are_no_directions() -> None:
    a, b = normal(8, 2), normal(8, 3, seed=1)
    for repeated in (a @ normal(2, 5, seed=2), (a @ normal(2, 5, seed=2)).float()):
        torch.testing.assert_close(principal_angles(repeated, b), principal_angles(a, b), rtol=0, atol=1e-5)


def test_scores_that_vary_by_rounding_alone_have_no_share() -> None:
    for value in (0.1, -3.7, 12345.678):
        constant = torch.full((2, 9, 9), value, dtype=torch.float64)
        nearly = constant * (1 + 2**-52 * torch.randint(0, 3, constant.shape))
        for scores in (constant, nearly):
            assert bool(toeplitz_share(scores).isnan().all())
            assert bool(toeplitz_share(scores, pool=True).isnan().all())
