"""Estimates with standard errors (over blocks of unequal size, over draws of several kinds, by jackknife), and
Student's t."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Float64, Int
from scipy import stats
from torch import Tensor

# t-intervals over so many blocks are seldom too wide to decide, nor do heavy tails make them too narrow.
_MIN_BLOCKS = 10
_MAX_ERROR_SCALE = 3.0  # how often the error of a mean below its threshold may be scaled up


class Estimate(NamedTuple):
    """An estimate from independent blocks of observations, and its standard error (NaN for a single block)."""

    value: Float64[Tensor, "..."]
    error: Float64[Tensor, "..."]


def ratio(
    top: Float[Tensor, "block ..."], bottom: Float[Tensor, "block ..."], weights: Float[Tensor, " block"]
) -> Estimate:
    """Compute a ratio of sums over all observations, and its standard error.

    The error is that of the blocks' sums of ``top - ratio · bottom``. Their squares are divided by 1 minus the block's
    share of the observations: a block that is most of all has hardly any residual from its own ratio.

    Args:
        top, bottom: means of each block, such as a text.
        weights: number of observations of each block.

    >>> kept, whole, tokens = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 4.0]), torch.tensor([10.0, 10.0])
    >>> [round(x.item(), 4) for x in ratio(kept, whole, tokens)]
    [0.375, 0.125]
    """
    share = (weights.double() / weights.sum()).view(-1, *[1] * (top.ndim - 1)).to(top.device)
    whole = (share * bottom).sum(0)
    value = (share * top).sum(0) / whole
    if len(weights) < 2:
        return Estimate(value, torch.full_like(value, nan))
    rest = share * (top - value * bottom)
    return Estimate(value, (rest.square() / (1 - share)).sum(0).sqrt() / whole.abs())


def mean(values: Float[Tensor, "block ..."], weights: Float[Tensor, " block"]) -> Estimate:
    """Compute the mean over all observations, given those of each block, and its standard error (see ``ratio``).

    >>> mean(torch.tensor([[1.0], [4.0]], dtype=torch.float64), torch.tensor([2.0, 1.0])).value.tolist()
    [2.0]
    """
    return ratio(values, torch.ones_like(values), weights)


def difference(
    a: Float[Tensor, "block ..."], b: Float[Tensor, "block ..."], weights: Float[Tensor, " block"]
) -> Estimate:
    """Compute the difference of two means of the same observations, and its standard error (see ``mean``)."""
    return mean(a - b, weights)


def degrees_of_freedom(weights: Float[Tensor, " block"]) -> float:
    """Compute those of the standard errors above by Satterthwaite: one fewer than blocks of equal size, fewer for
    others, NaN for a single block.

    >>> round(degrees_of_freedom(torch.ones(5)), 6)
    4.0
    """
    if len(weights) < 2:
        return nan
    # With independent sums of variance w, residuals r = s - w Σs have covariance diag(w) - w wᵀ, and
    # V = Σ r² / (1 - w) has expectation 1 and variance 2 / df.
    w = weights.double() / weights.sum()
    a = w / (1 - w)
    return 1 / float(w.square().sum() + (w * a).sum().square() - (w * a).square().sum())


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of observations: each block's sum counts as one independent observation, with a variance like its size.

    Attributes:
        numbers: the block of each observation, from 0 on.
    """

    numbers: Int[Tensor, " observation"]

    @classmethod
    def of_texts(cls, lengths: Sequence[int]) -> Blocks:
        """Blocks of the observations (predicted tokens) of texts in a row.

        Each text is a block. One with more than a tenth of all observations is cut into equal parts of at most a tenth:
        few blocks, or one that is nearly the whole, have few degrees of freedom. Losses of a text's tokens are nearly
        independent, so parts of a text count as independent too.
        """
        total, parts, first = sum(lengths), list[Tensor](), 0
        for length in lengths:
            pieces = min(length, -(-_MIN_BLOCKS * length // total)) if length else 1
            parts.append(first + torch.arange(length) * pieces // max(length, 1))
            first += pieces if length else 0
        return cls(torch.cat(parts))

    @property
    def sizes(self) -> Float64[Tensor, " block"]:
        """The number of observations in each block."""
        return self.numbers.bincount().double()

    def means(self, values: Float[Tensor, "observation ..."]) -> Float64[Tensor, "block ..."]:
        """Compute the mean of each block."""
        sums = torch.zeros(len(self.sizes), *values.shape[1:], dtype=torch.float64)
        sums.index_add_(0, self.numbers.cpu(), values.double().cpu())
        return sums / self.sizes.view(-1, *[1] * (values.ndim - 1))


def significance(size: float, error: float, df: float) -> float:
    """Compute the confidence at which a two-sided t-interval around ``±size`` excludes 0; 0 without an error.

    >>> [round(significance(t, 1.0, df), 3) for t, df in ((2.262, 9), (4.303, 2), (1.96, 1e5))]
    [0.95, 0.95, 0.95]
    """
    if not (error >= 0 and df > 0):
        return 0.0
    if error == 0:
        return float(size > 0)
    return float(1 - 2 * stats.t.sf(size / error, df))


def surely_below(value: float, error: float, threshold: float, df: float) -> tuple[bool, float]:
    """Whether a divergence, or a ratio of two, is at most a threshold, and the confidence with which it is so or not.

    Blocks' divergences are skewed: without a rare large one both the mean and its error are too small. The error of a
    mean below the threshold is therefore scaled by ``threshold / value``, as if it were a constant part of the mean,
    but at most tripled: means are not that much too small, and below rounding an error is no part of its mean.
    """
    if value <= 0:  # equal up to rounding
        return True, 1.0
    scaled = error * min(_MAX_ERROR_SCALE, max(1.0, threshold / value))
    return value <= threshold, significance(abs(value - threshold), scaled, df)


def error_over_draws(table: pd.DataFrame, column: str, draws: Sequence[str]) -> float:
    """Compute the standard error of a column's mean over several kinds of draws, such as texts and random seeds.

    Draws of each kind are independent: the variances of the mean that they cause add up. A kind that the table has no
    column for, or that was drawn once, adds nothing.

    >>> table = pd.DataFrame({"batch": [0, 0, 1, 1], "r": [1.0, 3.0, 5.0, 7.0]})
    >>> error_over_draws(table, "r", ["batch", "seed"])  # of two texts with the means 2 and 6
    2.0
    """
    means = [table.groupby(name)[column].mean().dropna() for name in draws if name in table]
    return float(sum(x.var() / len(x) for x in means if len(x) > 1) ** 0.5)


def jackknife(values: Float[Tensor, "left_out ..."], weights: Float[Tensor, " block"]) -> Estimate:
    """Compute the standard error of an estimate from the estimates that leave out one of the independent blocks.

    Blocks may be of unequal size: the error is that of pseudo-values weighted by size (Busing, Meijer and Van der
    Leeden, 1999), which for equal sizes is the usual one.

    Args:
        values: the estimate of all blocks, then those without each block.
        weights: number of observations of each block.

    >>> x = torch.tensor([1.0, 2.0, 6.0])
    >>> means = torch.cat([x.mean()[None], (x.sum() - x) / 2])
    >>> found = jackknife(means, torch.ones(3))
    >>> round(found.error.item(), 4), round(x.std().item() / 3**0.5, 4)  # of a mean, the usual
    (1.5275, 1.5275)
    """
    value, without = values[0], values[1:]
    if len(without) < 2:
        return Estimate(value, torch.full_like(value, nan))
    times = (weights.sum() / weights.double()).view(-1, *[1] * (without.ndim - 1)).to(without.device)
    pseudo = times * value - (times - 1) * without
    expected = len(without) * value - ((1 - 1 / times) * without).sum(0)
    return Estimate(value, ((pseudo - expected).square() / (times - 1)).mean(0).sqrt())


def false_discovery_rates(p: Float[Tensor, " test"]) -> Float64[Tensor, " test"]:
    """Compute the least false discovery rate at which each of several tests rejects (Benjamini–Hochberg); NaN stays.

    >>> p = torch.tensor([0.01, 0.04, float("nan"), 0.03], dtype=torch.float64)
    >>> false_discovery_rates(p).tolist()
    [0.03, 0.04, nan, 0.04]
    """
    rates, known = p.double().clone(), ~p.isnan()
    rates[known] = torch.as_tensor(stats.false_discovery_control(rates[known].numpy()))
    return rates
