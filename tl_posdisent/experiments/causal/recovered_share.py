"""Shares of replacements between two baselines, and their standard errors."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.utils.precision import apart
from tl_posdisent.utils.statistics import Estimate, mean, ratio


def share_between(
    values: Float[Tensor, "block ..."],
    baseline: Float[Tensor, "block ..."],
    untouched: Float[Tensor, "block ..."],
    sizes: Float[Tensor, " block"],
    dtype: torch.dtype,
) -> Estimate:
    """Compute where the mean of values lies between a baseline (0) and the untouched model (1).

    NaN where these two differ by no more than a standard error or, in a model of this dtype, rounding.
    """
    gap, noise = mean(baseline - untouched, sizes)
    end = mean(baseline, sizes).value
    defined = ~(gap.abs() <= noise) & apart(end, end - gap, dtype)
    return _where(defined, ratio(baseline - values, baseline - untouched, sizes))


def share_of_kl(
    kl: Float[Tensor, "block ..."],
    uniform: Float[Tensor, "block ..."],
    sizes: Float[Tensor, " block"],
    loss: Float[Tensor, "..."],
    dtype: torch.dtype = torch.float32,
) -> Estimate:
    """Compute the share of the divergence under uniform attention that a rung removes.

    NaN where that divergence is within rounding of the model's loss.
    """
    whole = mean(uniform, sizes).value
    return _where(apart(loss + whole, loss, dtype), ratio(uniform - kl, uniform, sizes))


def _where(defined: Tensor, found: Estimate) -> Estimate:
    """Return NaN where a share is not defined."""
    value, error = (x.where(defined, torch.nan) for x in found)
    return Estimate(value, error)
