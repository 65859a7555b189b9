"""The additive fit is the least-squares fit, whatever the mask; its shares are those of each axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.dense import dense_fitted
from support.masks import CASES, Case, cells_of, distances
from torch import Tensor

from tl_posdisent import fit_additive

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@every_case
def test_fitted_scores_are_those_of_dense_least_squares(case: Case) -> None:
    scores, fit = case.fitted
    torch.testing.assert_close(fit.fitted(), dense_fitted(scores, case.mask), rtol=0, atol=1e-8)


def largest_marginal(x: Tensor, case: Case) -> float:
    """The largest mean over the cells of a distance, query or key."""
    x = torch.where(case.mask, x, 0.0)
    count = case.mask.expand(case.shape).double()
    where = (distances(case) - distances(case).min()).flatten()
    sums = []
    for y in (x, count):
        diagonal = torch.zeros(*case.shape[:-2], int(where.max()) + 1, dtype=torch.float64)
        diagonal.index_add_(-1, where, y.flatten(-2))
        sums.append(torch.cat([y.sum(-1), y.sum(-2), diagonal], -1))
    return float((sums[0] / sums[1].clamp_min(1)).abs().max())


@every_case
def test_residual_has_no_marginals(case: Case) -> None:
    scores, fit = case.fitted
    assert largest_marginal(fit.residual(scores), case) < 2e-12 * float(scores.abs().max())


@every_case
def test_r_is_the_correlation_of_scores_and_fitted_scores(case: Case) -> None:
    scores, fit = case.fitted
    pairs = zip(cells_of(scores, case), cells_of(fit.fitted(), case), strict=True)
    spare = (fit.n_cells - fit.n_parameters).flatten()
    for r, r2, left, (x, y) in zip(fit.r.flatten(), fit.r2.flatten(), spare, pairs, strict=True):
        if left == 0:  # it fits anything
            torch.testing.assert_close(x, y, rtol=0, atol=1e-9)
            assert r.isnan()
            assert r2.isnan()
        else:
            assert r.item() == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-10)
            assert r2.item() == pytest.approx(r.item() ** 2, abs=1e-12)


@every_case
def test_adjusted_r2_pays_for_every_parameter(case: Case) -> None:
    fit = case.fitted[1]
    n, p = fit.n_cells.double(), fit.n_parameters.double()
    expected = torch.where(n > p, 1 - (1 - fit.r2) * (n - 1) / (n - p), torch.nan)
    torch.testing.assert_close(fit.r2_adjusted, expected, rtol=0, atol=1e-12, equal_nan=True)


@every_case
def test_shares_are_those_of_each_axis_alone(case: Case) -> None:
    scores, fit = case.fitted
    n_query, n_key = case.shape[-2:]
    axes = {
        "distance": distances(case) - distances(case).min(),
        "query": torch.arange(n_query)[:, None].expand(n_query, n_key),
        "key": torch.arange(n_key).expand(n_query, n_key),
    }
    masks = case.mask.expand(case.shape).reshape(-1, n_query, n_key)
    for name, axis in axes.items():
        for share, x, mask in zip(getattr(fit, f"share_{name}").flatten(), cells_of(scores, case), masks, strict=True):
            group = torch.nn.functional.one_hot(axis[mask]).double()
            means = group.T @ x / group.sum(0).clamp_min(1)
            expected = (group @ means - x.mean()).square().sum() / (x - x.mean()).square().sum()
            torch.testing.assert_close(share, expected, rtol=0, atol=1e-10, equal_nan=True)


@every_case
def test_intercept_and_components_add_up(case: Case) -> None:
    scores, fit = case.fitted
    total = fit.intercept[..., None, None] + sum(fit.component(name) for name in ("distance", "query", "key"))
    inside = case.mask.expand(case.shape)
    torch.testing.assert_close(fit.fitted(), torch.where(inside, total, 0.0), rtol=0, atol=1e-12)
    torch.testing.assert_close(fit.residual(scores), torch.where(inside, scores - total, 0.0), rtol=0, atol=1e-12)
    assert torch.equal(fit.mask.expand(case.shape), inside)
    filled = fit.fitted(fill=-torch.inf)
    assert torch.equal(filled.isinf(), ~inside)
    torch.testing.assert_close(filled[inside], total[inside], rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_a_fit_without_residual_degrees_of_freedom_has_no_correlation(mask: Any) -> None:
    """Two tokens: three or four cells, and as many parameters. Pooled texts share the distances, and leave some."""
    scores = torch.randn(3, 2, 2, 2, dtype=torch.float64)
    for x in (scores, scores.bfloat16()):
        fit = fit_additive(x, mask=mask)
        assert torch.equal(fit.n_cells, fit.n_parameters)
        for name in ("r", "r2", "r2_adjusted"):
            assert bool(getattr(fit, name).isnan().all())
        torch.testing.assert_close(fit.fitted(), x.double() * fit.mask, rtol=0, atol=1e-9)
        assert "r undefined" in repr(fit)
    pooled = fit_additive(scores, mask=mask, pool=True)
    spare = pooled.n_cells > pooled.n_parameters
    assert torch.equal(pooled.r.isnan(), ~spare)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float64, x) for x in (0.1, -3.7, 12345.678, 1e-300)]
    + [(x, 0.1) for x in (torch.float16, torch.bfloat16, torch.float32)],
    ids=str,
)
def test_constant_scores_have_no_correlation(dtype: torch.dtype, value: float) -> None:
    for n in (7, 29):
        constant = torch.full((2, n, n), value, dtype=dtype)
        for mask in ("causal", "full"):
            fit = fit_additive(constant, mask=mask)
            assert bool(fit.r.isnan().all())
            torch.testing.assert_close(fit.intercept, constant[:, 0, 0].double(), rtol=1e-12, atol=0)
    # But for the last bit of float64, which is what sums round to.
    nearly = constant.double() * (1 + 2**-52 * torch.randint(0, 3, constant.shape))
    fit = fit_additive(nearly)
    assert bool(fit.r.isnan().all())
    assert bool(fit.share_distance.isnan().all())


@pytest.mark.parametrize("level", [1e4, -1e4, 1e6])
def test_a_mean_large_against_the_spread_costs_no_digits(level: float) -> None:
    scores = torch.randn(2, 30, 30, dtype=torch.float64)
    shifted = level + scores
    expected = fit_additive(shifted - level)  # the same numbers, after the rounding of the sum
    fit = fit_additive(shifted)
    torch.testing.assert_close(fit.r, expected.r, rtol=0, atol=1e-9 if level < 1e5 else 1e-8)
    torch.testing.assert_close(fit.distance, expected.distance, rtol=0, atol=1e-8)
