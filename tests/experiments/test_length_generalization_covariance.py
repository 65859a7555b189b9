"""The shrunk covariance of typical vectors is that of Ledoit and Wolf."""

from __future__ import annotations

import pytest
import torch
from sklearn.covariance import LedoitWolf

from tl_posdisent.experiments.robustness.length_generalization import fit_typical


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("n", "d"), [(5, 8), (40, 3)])
def test_the_shrunk_covariance_is_that_of_ledoit_and_wolf(n: int, d: int) -> None:
    x = normal(2, n, d) * torch.arange(1.0, d + 1) + 3
    typical = fit_typical(x)
    for head in range(2):
        other = LedoitWolf().fit(x[head].numpy())
        torch.testing.assert_close(typical.covariance()[head], torch.from_numpy(other.covariance_))
        expected = torch.from_numpy(other.mahalanobis(x[head].numpy())).sqrt()
        torch.testing.assert_close(typical.distance(x)[head], expected)


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (normal(1, 3), r"at least two finite vectors .* got shape \(1, 3\)"),
        (normal(4, 3) * torch.nan, "got some that are not finite"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_refusals(vectors: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_typical(vectors)
