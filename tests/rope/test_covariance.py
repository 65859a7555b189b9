"""Mean and covariance of points: refusals. That merged parts are the whole is in test_moments."""

from __future__ import annotations

import math

import pytest
import torch

from tl_posdisent.rope.covariance import Spread


@pytest.mark.usefixtures("unchecked")
def test_spreads_that_are_none_are_refused() -> None:
    mean, cov = torch.zeros(2, 4).double(), torch.zeros(2, 4, 4).double()
    with pytest.raises(ValueError, match=r"mean must be float64 of shape \(head, coordinate\), got torch.float32"):
        Spread(1, mean.float(), cov)
    with pytest.raises(ValueError, match=r"cov must be float64 of shape \(head, coordinate, coordinate\)"):
        Spread(1, mean, cov[0])
    with pytest.raises(ValueError, match=r"mean and cov do not fit: their shapes are \(2, 4\) and \(1, 4, 4\)"):
        Spread(1, mean, cov[:1])
    for bad in ((0, mean, cov), (math.nan, mean, cov), (1, mean / 0, cov)):
        with pytest.raises(ValueError, match="positive count, and finite mean and covariance"):
            Spread(*bad)
