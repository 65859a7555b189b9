"""Ratios of sums over texts, their standard errors over blocks of unequal size, and the significance of Student's t."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import atan2, nan, pi

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

_LEAST = 10  # t-intervals over so many blocks are seldom too wide to decide, nor do heavy tails make them too narrow


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of observations: each block's sum counts as one independent observation, with a variance like its size.

    Attributes:
        numbers: the block of each observation, from 0 to ``count - 1``.
    """

    numbers: Int[Tensor, "observation"]

    @classmethod
    def of_texts(cls, lengths: Sequence[int]) -> Blocks:
        """Blocks of the observations (predicted tokens) of texts in a row.

        Each text is a block. One with more than a tenth of all observations is cut into equal parts of at most a tenth:
        few blocks, or one that is nearly the whole, have few degrees of freedom. Losses of a text's tokens are nearly
        independent, so parts of a text count as independent too.
        """
        total, parts, first = sum(lengths), list[Tensor](), 0
        for length in lengths:
            pieces = min(length, -(-_LEAST * length // total)) if length else 1
            parts.append(first + torch.arange(length, device="cpu") * pieces // max(length, 1))
            first += pieces if length else 0
        return cls(torch.cat(parts))

    @classmethod
    def single(cls, n: int) -> Blocks:
        """Each observation is a block."""
        return cls(torch.arange(n, device="cpu"))

    @property
    def count(self) -> int:
        return int(self.numbers.max()) + 1

    @property
    def weights(self) -> Float[Tensor, "block"]:
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

    def ratio(self, top: Float[Tensor, "observation"], bottom: Float[Tensor, "observation"]) -> tuple[float, float]:
        """A ratio of sums, and its standard error (NaN for a single block).

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

    def mean(self, values: Float[Tensor, "observation"]) -> tuple[float, float]:
        """The mean of all observations, and its standard error (NaN for a single block)."""
        return self.ratio(values, torch.ones_like(values))


def significance(size: float, error: float, df: float) -> float:
    """The confidence with which a two-sided t-interval around ``±size`` leaves out 0; 0 without an error.

    >>> [round(significance(t, 1.0, df), 3) for t, df in ((2.262, 9), (4.303, 2), (1.96, 1e5))]
    [0.95, 0.95, 0.95]
    """
    if not (error >= 0 and df > 0):
        return 0.0
    # With t = sqrt(df) tan(x), Student's density is cos(x) ** (df - 1) up to a factor.
    steps = (np.arange(4096) + 0.5) / 4096
    within, half = (x * np.mean(np.cos(x * steps) ** (df - 1)) for x in (atan2(size, error * df**0.5), pi / 2))
    return float(within / half)
