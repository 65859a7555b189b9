"""The reference sample: its covariance is that of Ledoit and Wolf, and a member left out is a fit without it."""

from __future__ import annotations

import pytest
import torch
from sklearn.covariance import LedoitWolf
from torch import Tensor

from tl_posdisent.experiments.robustness.mahalanobis import fit_reference


def sample(n: int, d: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(d, d, generator=generator, dtype=torch.float64)
    return torch.randn(2, n, d, generator=generator, dtype=torch.float64) @ mixing + 3


@pytest.mark.parametrize(("n", "d"), [(400, 4), (30, 8), (9, 16)])
def test_shrinkage_is_that_of_ledoit_and_wolf(n: int, d: int) -> None:
    x = sample(n, d)
    reference = fit_reference(x)
    for i in range(2):
        theirs = LedoitWolf().fit(x[i].numpy())
        assert reference.shrinkage[i].item() == pytest.approx(theirs.shrinkage_, rel=1e-9, abs=1e-12)
        torch.testing.assert_close(reference.mean[i], torch.from_numpy(theirs.location_))
        squared = torch.from_numpy(theirs.mahalanobis(x[i].numpy()))
        torch.testing.assert_close(reference.distance(x)[i].square(), squared)


@pytest.mark.parametrize(("n", "d"), [(40, 4), (9, 16)])
def test_leaving_a_member_out_is_a_fit_without_it(n: int, d: int) -> None:
    """With ρ and μ as they are, of mean and covariance of the others; for the member and for any other vector."""
    x, other = sample(n, d), sample(n, d, seed=1)
    reference = fit_reference(x)
    rho, level = reference.shrinkage[:, None, None], reference.spread.mean(-1)[:, None, None] * torch.eye(d)
    for y in (x, other):
        got = reference.distance_without(y, torch.arange(n))
        for i in range(n):
            rest = x[:, torch.arange(n) != i]
            centred = rest - rest.mean(1, keepdim=True)
            covariance = (1 - rho) * centred.mT @ centred / (n - 1) + rho * level
            w = y[:, i] - rest.mean(1)
            expected = torch.einsum("bd,bd->b", w, torch.linalg.solve(covariance, w)).sqrt()
            torch.testing.assert_close(got[:, i], expected)


@pytest.mark.usefixtures("unchecked")
def test_a_sample_that_does_not_vary() -> None:
    reference = fit_reference(torch.ones(5, 3))
    assert reference.distance(torch.ones(1, 3)).tolist() == [0]
    assert reference.distance(torch.zeros(1, 3)).item() > 1e50
    for wrong in (torch.ones(1, 3), torch.full((3, 3), torch.nan), torch.ones(3)):
        with pytest.raises(ValueError, match="x must be at least two finite vectors"):
            fit_reference(wrong)
