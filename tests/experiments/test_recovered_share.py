"""Shares between two baselines are ratios of means, and NaN where the baselines do not differ."""

from __future__ import annotations

from math import isnan

import pytest
import torch

from tl_posdisent.experiments.causal.recovered_share import share_between, share_of_kl

SIZES = torch.ones(4)
UNTOUCHED = 1000 + torch.arange(4, dtype=torch.float64)
GAP = torch.tensor([1.0, 3.0, 2.0, 2.0], dtype=torch.float64)


@pytest.mark.parametrize("sign", [1, -1])
def test_shares_between_baselines(sign: int) -> None:
    baseline = UNTOUCHED + sign * GAP
    for values, share in ((baseline, 0), (UNTOUCHED, 1), (UNTOUCHED + 3 * sign * GAP, -2), (baseline + 0.5, -sign / 4)):
        found, error = share_between(values, baseline, UNTOUCHED, SIZES, torch.float32)
        assert found == pytest.approx(share)
        assert (error > 1e-3) == (share == -sign / 4)  # the only change that is no multiple of the gap


@pytest.mark.parametrize(
    ("gap", "dtype", "known"),
    [
        (0.1, torch.float32, True),
        (0.001, torch.float32, False),  # the values are about 1000
        (0.1, torch.bfloat16, False),
        (torch.tensor([1.0, -1.0, 1.0, -0.5]), torch.float32, False),  # less than its standard error
        (torch.nan, torch.float32, False),
    ],
)
def test_no_share_where_the_baselines_do_not_differ(gap: float | torch.Tensor, dtype: torch.dtype, known: bool) -> None:
    found = share_between(UNTOUCHED, UNTOUCHED + gap, UNTOUCHED, SIZES, dtype)
    assert [isnan(x) for x in found] == [not known] * 2


@pytest.mark.parametrize(
    ("size", "dtype", "known"),
    [
        (1e-3, torch.float32, True),
        (1e-6, torch.float32, False),  # of a loss of 5
        (1e-3, torch.bfloat16, False),
        (torch.nan, torch.float32, False),
    ],
)
def test_shares_of_a_divergence(size: float, dtype: torch.dtype, known: bool) -> None:
    uniform = size * GAP
    found, error = share_of_kl(uniform / 4, uniform, SIZES, torch.tensor(5.0), dtype)
    if known:
        assert (found, error) == pytest.approx((0.75, 0))
    else:
        assert isnan(found)
        assert isnan(error)
