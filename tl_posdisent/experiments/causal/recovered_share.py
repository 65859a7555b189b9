"""Shares of a replacement between two baselines, and their standard errors."""

from __future__ import annotations

from math import isnan, nan

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.utils.precision import apart
from tl_posdisent.utils.statistics import Blocks


def share_between(
    values: Float[Tensor, " observation"],
    baseline: Float[Tensor, " observation"],
    untouched: Float[Tensor, " observation"],
    blocks: Blocks,
    dtype: torch.dtype,
) -> tuple[float, float]:
    """Compute where the mean of values lies between a baseline (0) and the untouched model (1), and the standard error.

    NaN where these two differ by no more than a standard error or, in a model of this dtype, rounding.
    """
    effect = baseline - untouched
    gap, noise = blocks.mean(effect)
    end = baseline.mean().item()
    if abs(gap) <= noise or isnan(gap) or not apart(end, end - gap, dtype):
        return nan, nan
    return blocks.ratio(baseline - values, effect)


def share_of_kl(
    kl: Float[Tensor, " observation"],
    uniform: Float[Tensor, " observation"],
    blocks: Blocks,
    loss: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[float, float]:
    """Compute the share of the divergence under uniform attention that a rung removes, and its standard error.

    NaN where that divergence is within rounding of the model's loss.
    """
    whole = uniform.mean().item()
    if isnan(whole) or not apart(loss + whole, loss, dtype):
        return nan, nan
    return blocks.ratio(uniform - kl, uniform)
