"""Standard errors (over blocks of unequal size, over draws of several kinds, by jackknife), Student's t."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float64, Int
from scipy import stats
from torch import Tensor

# t-intervals over so many blocks are seldom too wide to decide, nor do heavy tails make them too narrow.
_MIN_BLOCKS = 10
_MAX_ERROR_SCALE = 3.0  # how often the error of a mean below its threshold may be scaled up


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of observations: each block's sum counts as one independent observation, with a variance like its size.

    Attributes:
        numbers: the block of each observation, from 0 to ``count - 1``.
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

    @classmethod
    def single(cls, n: int) -> Blocks:
        """Make each observation a block."""
        return cls(torch.arange(n))

    @property
    def count(self) -> int:
        return int(self.numbers.max()) + 1

    @property
    def weights(self) -> Float[Tensor, " block"]:
        """The share of all observations in each block."""
        return self.numbers.bincount().double() / len(self.numbers)

    @property
    def df(self) -> float:
        """Degrees of freedom of ``ratio``'s standard error by Satterthwaite: ``count - 1`` for blocks of equal size,
        fewer for others, NaN for a single block."""
        if self.count < 2:
            return nan
        # With independent sums of variance w, residuals r = s - w Σs have covariance diag(w) - w wᵀ, and
        # V = Σ r² / (1 - w) has expectation 1 and variance 2 / df.
        w = self.weights
        a = w / (1 - w)
        return 1 / float(w.square().sum() + (w * a).sum().square() - (w * a).square().sum())

    def ratio(self, top: Float[Tensor, " observation"], bottom: Float[Tensor, " observation"]) -> tuple[float, float]:
        """Compute a ratio of sums and its standard error (NaN for a single block).

        The error is that of the blocks' sums of ``top - ratio · bottom``. Their squares are divided by 1 minus the
        block's share of the observations: a block that is most of all has hardly any residual from its own ratio.
        """
        whole = bottom.sum()
        ratio = top.sum() / whole
        if self.count < 2:
            return ratio.item(), nan
        rest = top.new_zeros(self.count).index_add(0, self.numbers.to(top.device), top - ratio * bottom)
        error = (rest.square() / (1 - self.weights.to(rest))).sum().sqrt() / whole.abs()
        return ratio.item(), error.item()

    def mean(self, values: Float[Tensor, " observation"]) -> tuple[float, float]:
        """Compute the mean of all observations and its standard error (NaN for a single block)."""
        return self.ratio(values, torch.ones_like(values))


def weighted_means(
    values: Float64[Tensor, "text row"], weights: Float64[Tensor, " text"]
) -> tuple[Float64[np.ndarray, " row"], Float64[np.ndarray, " row"]]:
    """Average over texts by weight, with the standard errors of ``Blocks.mean`` of one block a text (NaN for one text).

    >>> values = torch.tensor([[1.0], [4.0]], dtype=torch.float64)
    >>> weighted_means(values, torch.tensor([2.0, 1.0], dtype=torch.float64))[0].tolist()
    [2.0]
    """
    w = (weights / weights.sum())[:, None]
    mean = (w * values).sum(0)
    error = torch.full_like(mean, nan)
    if len(values) > 1:
        error = ((w * (values - mean)).square() / (1 - w)).sum(0).sqrt()
    return mean.numpy(), error.numpy()


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


def jackknife_error(without: Float[Tensor, " draw *estimate"]) -> Float[Tensor, "*estimate"]:
    """Compute the standard error of an estimate from the estimates that leave out one of the independent draws.

    >>> x = torch.tensor([1.0, 2.0, 6.0])
    >>> round(jackknife_error((x.sum() - x) / 2).item(), 4), round(x.std().item() / 3**0.5, 4)  # of a mean, the usual
    (1.5275, 1.5275)
    """
    error: Tensor = ((len(without) - 1) * without.var(0, correction=0)).sqrt()
    return error
