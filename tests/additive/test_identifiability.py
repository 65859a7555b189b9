"""Components obey their gauge, and what is not determined does not matter."""

from __future__ import annotations

import pytest
import torch
from support.masks import CASES, Case, cells_of, distances, named
from torch import Tensor

from tl_posdisent import fit_additive

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@every_case
def test_components_have_mean_0_and_the_key_no_trend(case: Case) -> None:
    scores, fit = case.fitted
    position = torch.arange(case.shape[-1]).double().expand(case.shape)
    for name in ("distance", "query", "key"):
        for x in cells_of(fit.component(name), case):
            assert abs(x.mean().item()) < 1e-10
    for x, j in zip(cells_of(fit.component("key"), case), cells_of(position, case), strict=True):
        assert abs((x * (j - j.mean())).mean().item()) < 1e-10
    for x, mean in zip(cells_of(scores, case), fit.intercept.flatten(), strict=True):
        assert mean.item() == pytest.approx(x.mean().item(), abs=1e-11)


@every_case
def test_components_of_what_has_no_cells_are_0(case: Case) -> None:
    fit = case.fitted[1]
    mask = case.mask.expand(case.shape)
    assert bool((fit.query[~mask.any(-1)] == 0).all())
    assert bool((fit.key[~mask.any(-2)] == 0).all())
    for n, distance in enumerate(fit.distances.tolist()):
        without = ~(mask & (distances(case) == distance)).flatten(-2).any(-1)
        assert bool((fit.distance[..., n][without] == 0).all())


def planted(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Components in their gauge, and the scores that they make."""
    n_query, n_key = case.shape[-2:]
    generator = torch.Generator().manual_seed(7)
    a, b, c = (
        torch.randn(*case.shape[:-2], n, generator=generator, dtype=torch.float64) for n in (n_key, n_query, n_key)
    )
    j = torch.arange(n_key).double()
    n_d, n_q, n_k = (n_key - j, torch.arange(n_query) + 1.0, n_key - j)  # cells under a causal square mask
    j = j - (n_k * j).sum() / n_k.sum()
    c = c - (n_k * c).sum(-1, keepdim=True) / n_k.sum()
    c = c - (n_k * c * j).sum(-1, keepdim=True) / (n_k * j * j).sum() * j
    a = a - (n_d * a).sum(-1, keepdim=True) / n_d.sum()
    b = b - (n_q * b).sum(-1, keepdim=True) / n_q.sum()
    return a, b, c, 0.7 + a[..., distances(case).clamp_min(0)] + b[..., :, None] + c[..., None, :]


@pytest.mark.parametrize("length", [2, 5, 33, 200])
def test_planted_components_are_recovered(length: int) -> None:
    case = named(length, length, batch=(3,))
    a, b, c, scores = planted(case)
    fit = fit_additive(scores)
    for found, expected in (
        (fit.distance, a),
        (fit.query, b),
        (fit.key, c),
        (fit.intercept, torch.full((3,), 0.7, dtype=torch.float64)),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
    if length < 4:
        assert bool(fit.r.isnan().all())  # as many parameters as cells
    else:
        torch.testing.assert_close(fit.r, torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-12)
